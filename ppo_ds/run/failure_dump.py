"""Dump of the optimizer step that ended a run, for inspection: dumps/step_000012/.

update.json has the name, rank and row of the first non-finite tensor, and all rows as text. The tensors of
the rows are in update.safetensors. There are also config.yaml and, as in a checkpoint, a folder for each
model, in its state before the step. Nothing is pickled.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ppo_ds.engine.checkpoint.files import CheckpointError, on_all_ranks, write_json, write_tensors
from ppo_ds.engine.checkpoint.state import save_model
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.run.nan_debug import ReplayedRow
from ppo_ds.secrets import censored_tree
from ppo_ds.storage.drafts import draft_path, publish_directory, write_file
from ppo_ds.tracking.tracker import finite

FORMAT = 1
SHOWN = 200  # characters of a row in the error message


def dump_failure(
    folder: Path,
    step: int,
    what: tuple[str, ...],
    replayed: list[ReplayedRow],
    *,
    rows: list[dict[str, Any]],
    place: str,
    columns: Mapping[str, Tensor],
    models: Mapping[str, TrainedModel],
    config: Path,
    about: Mapping[str, Any] | None = None,
    hint: str = "",
) -> str:
    """Writes the dump and returns the error message. All ranks must call this.

    ``what`` are the names of the tensors in which the run found non-finite numbers, ``replayed`` the results
    of a replay. ``rows`` are the rows of the optimizer step as text; the message shows their "prompt".
    ``place`` is a template for naming a row in the message, such as "row {number}". ``columns`` are the
    tensors of the rows, ``about`` further entries of update.json. ``hint`` ends the message if the dump was
    written.
    """
    first = " and ".join(what)
    first += " (finite when the step was replayed: a fault of the hardware or of a kernel?)"
    contents: dict[str, Any] = {"step": step, "what": first, "rank": None, "place": None}
    where = ""
    bad = next((row for row in replayed if row.first is not None), None)
    if bad is not None:
        prompt = rows[bad.position]["prompt"]
        shown = prompt if len(prompt) <= SHOWN else f"{prompt[: SHOWN // 2]} ... {prompt[-SHOWN // 2 :]}"
        where = f", on rank {bad.rank}, in {place.format(**rows[bad.position])}, prompt {shown!r}"
        contents |= {"what": bad.first, "rank": bad.rank, "place": bad.position}
    line = f"step {step}: not finite: {contents['what']}{where}"
    contents |= {**(about or {}), "rows": finite(rows)}
    try:
        write_dump(folder, contents, columns, models, config)
    except CheckpointError as error:
        return f"{line}; {folder} could not be written: {error}"
    return f"{line}; the step is dumped in {folder}{hint}"


def write_dump(
    folder: Path,
    contents: Mapping[str, Any],
    columns: Mapping[str, Tensor],
    models: Mapping[str, TrainedModel],
    config: Path,
) -> None:
    """Writes the dump; ``contents`` is update.json. May raise CheckpointError. All ranks must call this."""
    world = next(iter(models.values())).world
    draft = world.gather_objects(draft_path(folder))[0]  # every rank uses the path of rank 0

    def write_config() -> None:
        if world.is_main:
            draft.mkdir(parents=True)
            if config.exists():
                write_file(draft / "config.yaml", config.read_bytes())

    def write_update() -> None:
        if world.is_main:
            write_tensors(draft / "update.safetensors", dict(columns))
            about = {"format": FORMAT, "world_size": world.size, **contents}
            write_json(draft / "update.json", censored_tree(about))
            publish_directory(draft, folder)  # may replace the dump of an earlier launch

    try:
        on_all_ranks(world, write_config)
        for name, model in models.items():
            save_model(model, draft / name)
        on_all_ranks(world, write_update)
    except CheckpointError:
        if world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        raise
