"""The optimizer step that ended a run, in a folder of its own: for a person to read, and for launch/replay.py to make once more.

    dumps/step_000012/update.json          what was not finite, on which rank, in which row; the rows as text
                      update.safetensors   all columns of its experience
                      config.yaml          the run's
                      {actor,critic}/      as in a checkpoint: the weights are sound, since no bad step was ever made

No pickles. What a fault of the disk leaves half written has no update.json, which comes last.
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
from ppo_ds.ppo.learner import Learner
from ppo_ds.ppo.nan_debug import Blame, blame
from ppo_ds.tracking.tracker import finite
from ppo_ds.training.health import NonFiniteStep
from ppo_ds.types import Experience

FORMAT = 1
SHOWN = 200  # characters of a prompt in one line


@dataclass(frozen=True)
class Dump:
    """What update.json and update.safetensors say."""

    step: int
    what: str
    rank: int | None
    place: int | None
    kl_coef: float
    critic_only: bool
    rows: list[dict[str, Any]]
    minibatch: Experience

    def row(self, place: int) -> int:
        """Of the rollout, as the run's own messages count; ``place``: in the dump."""
        return self.rows[place]["row_of_the_rollout"]


def dump_failure(
    folder: Path, step: int, trouble: NonFiniteStep, learner: Learner, tokenizer: Tokenizer, config: Path
) -> str:
    """Finds out what went wrong first, writes the dump ``folder``, and tells both in one line. A collective."""
    blamed = blame(learner, trouble)
    rows = finite(sample_rows(trouble.minibatch, tokenizer, -1))
    line = f"step {step}: not finite: {blamed.what}"
    if blamed.position is not None:
        prompt = rows[blamed.position]["prompt"]
        shown = prompt if len(prompt) <= SHOWN else f"{prompt[: SHOWN // 2]} ... {prompt[-SHOWN // 2 :]}"
        line += f", on rank {blamed.rank}, in row {int(trouble.places[blamed.position])} of the rollout, prompt {shown!r}"
    try:
        write_dump(folder, step, trouble, blamed, rows, learner, config)
    except CheckpointError as error:
        return f"{line}; {folder} could not be written: {error}"
    return f"{line}; it is all in {folder}, and python launch/replay.py {folder} makes the step once more"


def write_dump(
    folder: Path,
    step: int,
    trouble: NonFiniteStep,
    blamed: Blame,
    rows: list[dict[str, Any]],
    learner: Learner,
    config: Path,
) -> None:
    """Raises CheckpointError, on all ranks, where it cannot be written. A collective."""
    world = learner.world

    def begin() -> None:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier start that ended here
            folder.mkdir(parents=True)
            if config.exists():
                shutil.copyfile(config, folder / "config.yaml")

    def end() -> None:
        if world.is_main:
            write_tensors(folder / "update.safetensors", trouble.minibatch.tensors())
            about = {
                "step": step,
                "what": blamed.what,
                "rank": blamed.rank,
                "place": blamed.position,
                "kl_coef": trouble.kl_coef,
                "critic_only": trouble.critic_only,
            }
            places = trouble.places.tolist()
            about["rows"] = [
                {"row_of_the_rollout": place, **row} for place, row in zip(places, rows, strict=True)
            ]
            write_json(folder / "update.json", {"format": FORMAT, "world_size": world.size, **about})

    on_all_ranks(world, begin)
    for role, model in {"actor": learner.actor, "critic": learner.critic}.items():
        if model is not None:
            save_model(model, folder / role)
    on_all_ranks(world, end)


def read_dump(folder: Path) -> Dump:
    try:
        about = json.loads((folder / "update.json").read_text(encoding="utf-8"))
        columns = load_file(folder / "update.safetensors")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: no whole dump: {error}; give a folder run.dir/dumps/step_NNNNNN"
        ) from error
    if about.get("format") != FORMAT:
        raise UserError(
            f"{folder}: has format {about.get('format')}, this version reads {FORMAT}: use the version that wrote it"
        )
    names = {f.name for f in fields(Dump)} - {"minibatch"}
    return Dump(**{name: about[name] for name in names}, minibatch=Experience(**columns))
