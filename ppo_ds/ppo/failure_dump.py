"""Dump of the optimizer step that ended a run, for inspection and for launch/replay.py.

    dumps/step_000012/update.json          the non-finite number, its rank and its row; all rows as text
                      update.safetensors   all columns of the minibatch
                      config.yaml          the run's config
                      {actor,critic}/      as in a checkpoint; weights are finite: the step was not applied

Nothing is pickled. The folder is complete or absent.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ppo_ds.engine.checkpoint.files import CheckpointError, on_all_ranks, write_json, write_tensors
from ppo_ds.engine.checkpoint.state import save_model
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ppo.experience_metrics import sample_rows
from ppo_ds.ppo.health import NonFiniteStep
from ppo_ds.ppo.learner import Learner
from ppo_ds.ppo.nan_debug import Origin, find_origin
from ppo_ds.secrets import censored_tree
from ppo_ds.storage.drafts import draft_path, publish_directory, write_file
from ppo_ds.tracking.tracker import finite
from ppo_ds.types import Experience

FORMAT = 1
SHOWN = 200  # characters of a prompt in the error message


@dataclass(frozen=True)
class Dump:
    """The contents of update.json and update.safetensors."""

    step: int
    what: str
    rank: int | None
    place: int | None
    kl_coef: float
    critic_only: bool
    rows: list[dict[str, Any]]
    minibatch: Experience

    def row(self, place: int) -> int:
        """Returns the index in the rollout, as in the run's messages, of row ``place`` of the dump."""
        return self.rows[place]["row_of_the_rollout"]


def dump_failure(
    folder: Path, step: int, skipped: NonFiniteStep, learner: Learner, tokenizer: Tokenizer, config: Path
) -> str:
    """Locates the first non-finite tensor, writes the dump and returns the error message. A collective."""
    origin = find_origin(learner, skipped)
    rows = finite(sample_rows(skipped.minibatch, tokenizer, -1))
    line = f"step {step}: not finite: {origin.what}"
    if origin.position is not None:
        prompt = rows[origin.position]["prompt"]
        shown = prompt if len(prompt) <= SHOWN else f"{prompt[: SHOWN // 2]} ... {prompt[-SHOWN // 2 :]}"
        row = int(skipped.rows[origin.position])
        line += f", on rank {origin.rank}, in row {row} of the rollout, prompt {shown!r}"
    try:
        write_dump(folder, step, skipped, origin, rows, learner, config)
    except CheckpointError as error:
        return f"{line}; {folder} could not be written: {error}"
    return f"{line}; the step is dumped in {folder}; replay it with: python launch/replay.py {folder}"


def write_dump(
    folder: Path,
    step: int,
    skipped: NonFiniteStep,
    origin: Origin,
    rows: list[dict[str, Any]],
    learner: Learner,
    config: Path,
) -> None:
    """Writes the dump. Raises CheckpointError, on all ranks, if that fails. A collective."""
    world = learner.world
    draft = world.gather_objects(draft_path(folder))[0]  # every rank uses the path of rank 0

    def write_config() -> None:
        if world.is_main:
            draft.mkdir(parents=True)
            if config.exists():
                write_file(draft / "config.yaml", config.read_bytes())

    def write_update() -> None:
        if world.is_main:
            write_tensors(draft / "update.safetensors", skipped.minibatch.tensors())
            about = {
                "step": step,
                "what": origin.what,
                "rank": origin.rank,
                "place": origin.position,
                "kl_coef": skipped.kl_coef,
                "critic_only": skipped.critic_only,
            }
            numbers = skipped.rows.tolist()
            about["rows"] = [
                {"row_of_the_rollout": number, **row} for number, row in zip(numbers, rows, strict=True)
            ]
            about = {"format": FORMAT, "world_size": world.size, **about}
            write_json(draft / "update.json", censored_tree(about))
            publish_directory(draft, folder)  # may replace the dump of an earlier start

    try:
        on_all_ranks(world, write_config)
        for role, model in {"actor": learner.actor, "critic": learner.critic}.items():
            if model is not None:
                save_model(model, draft / role)
        on_all_ranks(world, write_update)
    except CheckpointError:
        if world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def read_dump(folder: Path) -> Dump:
    """Reads a dump. Raises UserError unless the folder holds a complete dump of this format."""
    try:
        about = json.loads((folder / "update.json").read_text(encoding="utf-8"))
        columns = load_file(folder / "update.safetensors")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: is no complete dump: {error}; give a folder run.dir/dumps/step_NNNNNN"
        ) from error
    if about.get("format") != FORMAT:
        raise UserError(
            f"{folder}: has format {about.get('format')}, this version reads {FORMAT}: "
            "use the version that wrote it"
        )
    names = {f.name for f in fields(Dump)} - {"minibatch"}
    try:
        return Dump(**{name: about[name] for name in names}, minibatch=Experience(**columns))
    except (LookupError, TypeError) as error:
        raise UserError(f"{folder}: its update.json or update.safetensors lacks {error}") from error
