"""Export of trained models in Hugging Face format."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from ppo_ds.distributed.faults import fault
from ppo_ds.engine.checkpoint.checkpoints import mark_deleted, step_folders, step_of
from ppo_ds.engine.checkpoint.files import on_main_rank
from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import RunError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.run.stage import RunContext, Stage
from ppo_ds.storage.drafts import draft_directory, remove_drafts, write_file

log = logging.getLogger(__name__)
MARKER = ".step_export"  # file that export_step writes to each of its folders


def export_actor(run_dir: Path, actor: TrainedModel, ema: WeightCopy | None, tokenizer: Tokenizer) -> None:
    """Writes model/, model_ema/ (with ``ema``) and adapter/ (with LoRA). All ranks must call this."""
    policy = actor.module

    def save_policy(folder: Path, weights: dict[str, Tensor]) -> None:
        policy.save_adapter(run_dir / "adapter", weights)
        policy.save(folder, weights)

    export_model(actor, "lm.", run_dir / "model", save_policy, tokenizer)
    if ema is not None:
        with ema.swapped():
            export_model(actor, "lm.", run_dir / "model_ema", policy.save, tokenizer)


def export_model(
    model: TrainedModel,
    prefix: str,
    folder: Path,
    save: Callable[[Path, dict[str, Tensor]], None],
    tokenizer: Tokenizer,
) -> None:
    """Writes the weights of ``model`` and the tokenizer to ``folder``, which is replaced.

    All ranks must call this. Rank 0 calls ``save`` with the weights whose names start with ``prefix``, which
    is removed from the names. It keeps no other copy of these weights.
    """
    weights = consolidated(model)
    if weights is not None:
        names = [name for name in weights if name.startswith(prefix)]
        kept = {name.removeprefix(prefix): weights.pop(name) for name in names}
        with draft_directory(folder) as draft:
            save(draft, kept)
            tokenizer.save(draft)


def export_step(step: int, stage: Stage, context: RunContext, keep: int | None) -> None:
    """Writes the export of a step to step_models/step_NNNNNN, complete or not at all.

    All ranks must call this. Then deletes exports of later steps, which a resumed or rolled-back run repeats,
    and all but the newest ``keep`` exports. A folder without MARKER is neither replaced nor deleted, since no
    run has written it. Raises RunError on rank 0 if the export cannot be written.
    """
    root, world = context.run_dir / "step_models", context.world
    final = root / f"step_{step:06d}"
    if world.gather_objects(final.exists() and not (final / MARKER).exists())[0]:
        if world.is_main:
            log.warning("warning: step %d is not exported: %s is not of this run; move it away", step, final)
        return
    try:
        with draft_directory(final) if world.is_main else nullcontext(final) as draft:
            stage.export(draft)
            if world.is_main:
                write_file(draft / MARKER, "")
            fault("export.before_rename")
    except (OSError, SafetensorError) as error:  # safetensors raises another error if the disk is full
        raise RunError(f"{final} was not written: {error}") from error

    def prune() -> None:
        written = [folder for folder in step_folders(root) if (folder / MARKER).exists()]
        kept = [folder for folder in written if step_of(folder) <= step][:keep]
        for folder in set(written) - set(kept):
            mark_deleted(folder)
        remove_drafts(root)

    on_main_rank(world, prune)
    fault("export.after_rename")
