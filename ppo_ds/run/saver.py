"""Saves checkpoints of a run and restores earlier states: resume, rollback, undo of an abandoned step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ppo_ds.config.sections.run import CheckpointConfig
from ppo_ds.data.fingerprint import changed_rows
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.engine.checkpoint.state import exported_bytes
from ppo_ds.engine.rng import rng_snapshot
from ppo_ds.errors import UserError
from ppo_ds.run.export import export_step
from ppo_ds.run.health import TooManySkips
from ppo_ds.run.stage import HELD_OUT, Evaluation, RunContext, Stage
from ppo_ds.run.state import Selection, TrainState, is_due
from ppo_ds.run.stopping import Abandoned

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Saver:
    """Saves a run in checkpoints and returns it to an earlier state.

    A checkpoint holds weights, optimizers, random states, the progress of the run and the state of the stage.
    """

    context: RunContext
    stage: Stage
    checkpoints: Checkpoints
    config: CheckpointConfig
    selection: Selection  # of the best checkpoint

    state: TrainState = field(init=False, default_factory=TrainState)  # progress of the run
    last_checkpoint: Path | None = field(init=False, default=None)  # last checkpoint saved or resumed from
    interval_start: float = field(init=False, default=0.0)  # clock from which checkpoint.minutes counts
    saved_step: int | None = field(init=False, default=None)  # completed steps in the last checkpoint

    def __post_init__(self) -> None:
        self.state.select_by(self.selection.rule)

    def start_interval(self, clock: float) -> None:
        """Starts the interval of checkpoint.minutes at ``clock``; at its end, a checkpoint is due."""
        self.interval_start = clock

    def save_if_due(
        self, eval_score: float | None, clock: float, last: bool = False, again: bool = False
    ) -> None:
        """Saves a checkpoint if one is due, or if ``eval_score`` is better than the best checkpoint's.

        With ``last``, as at the end of the run, one is due unless checkpoint.every or the step is 0.
        While optimizer steps are being skipped, no other is saved, since a rollback needs a healthy state.
        ``clock`` is in seconds and equal on all ranks. ``again`` replaces the step's existing checkpoint.
        """
        if self.context.health.skips and not last:
            return
        step, every, minutes = self.state.step, self.config.every, self.config.minutes
        best = eval_score is not None and self.state.is_improvement(eval_score)
        if best:
            self.state.best_score, self.state.best_step = eval_score, step
        # no checkpoint before the first step, since an interrupted Stage.start is repeated as a whole
        by_time = minutes is not None and clock - self.interval_start >= 60 * minutes
        due = step > 0 and every != 0 and (last or by_time or is_due(step, every))
        if (due or best) and (again or self.saved_step != step):
            with self.context.timer("checkpoint"):
                self.last_checkpoint = self.checkpoints.save(
                    step, self.stage.models, self.state_dict(), best=best, copies=self.stage.weight_copies
                )
            self.saved_step = step
            self.start_interval(clock)

    def export_if_due(self) -> None:
        """Exports the models if due by checkpoint.export_every. Call before the step's checkpoint is saved.

        A run that is killed between export and save repeats the step, so no checkpoint lacks its export.
        """
        if is_due(self.state.step, self.config.export_every):
            with self.context.timer("export"):
                export_step(self.state.step, self.stage, self.context, self.config.keep_exports)

    def score_of(self, evaluation: Evaluation) -> float | None:
        """Returns the score of a held-out evaluation; None for other data or without checkpoint.keep_best."""
        if not self.config.keep_best or evaluation.data != HELD_OUT:
            return None
        return self.selection.score(evaluation.metrics)

    def check_disk_space(self) -> None:
        """Raises UserError if the disk lacks space for the next checkpoint and export."""
        models, copies = self.stage.models, self.stage.weight_copies
        exported = exported_bytes(models, copies) if self.config.export_every else 0
        if self.config.every == 0 and not self.config.keep_best:
            models, copies = {}, {}
        if (models or exported) and self.state.step < self.stage.total_steps:
            self.checkpoints.check_disk_space(models, copies, exported)

    def resume(self, path: Path) -> None:
        """Restores all that the checkpoint ``path`` holds. Raises UserError if it does not fit this run."""
        state = self.checkpoints.load(path, self.stage.models, self.stage.weight_copies)
        saved, kept = set(state) - {"progress"}, set(self.stage.state_dict())
        if saved != kept:
            raise UserError(
                f"run.resume: {path} holds the state of {', '.join(sorted(saved)) or 'nothing'}, "
                f"this run has {', '.join(sorted(kept)) or 'nothing'}: keep the settings that decide on "
                "them as they were (stage=ppo: algo.kl.controller, algo.ptx, data.difficulty, "
                "rollout.partial and the kind of reward), or start in another run.dir"
            )
        try:
            for line in changed_rows(state["progress"].get("data", {}), self.stage.data, path):
                self.context.banner.warn(line)
            self.load_state_dict(state)
        except (LookupError, TypeError, AttributeError) as error:  # valid JSON, but not written by a run
            raise UserError(f"run.resume: {path}: invalid state.json: {error!r}; use another") from error
        self.saved_step, self.last_checkpoint = self.state.step, path

    @property
    def can_roll_back(self) -> bool:
        """True if there is a checkpoint and the run was not rolled back before."""
        return self.last_checkpoint is not None and not self.state.rollbacks

    def roll_back(self, error: TooManySkips) -> None:
        """Returns to the last checkpoint. Raises UserError if the checkpoint is damaged."""
        health, failed_step, rollbacks = self.context.health, self.state.step + 1, self.state.rollbacks
        assert self.last_checkpoint is not None, "can_roll_back says whether there is a checkpoint"
        self.resume(self.last_checkpoint)
        self.state.rollbacks = rollbacks + 1
        health.restore(0, self.state.step + 1)
        health.take_reasons()
        if self.context.world.is_main:
            log.warning(
                "warning: step %d: %d times in a row no optimizer step was made (%s: not finite): "
                "rolled back to %s; if this happens again, the run ends",
                failed_step, health.max_skips, error, self.last_checkpoint,
            )  # fmt: skip

    @contextmanager
    def undo_if_abandoned(self) -> Iterator[None]:
        """Restores the progress, stage and random states from before the block if it raises Abandoned."""
        state, restore_rng = deepcopy(self.state_dict()), rng_snapshot(self.context.world)
        try:
            yield
        except Abandoned:
            self.load_state_dict(state)
            restore_rng()
            raise

    def state_dict(self) -> dict[str, Any]:
        data = {fingerprint.key: fingerprint.saved() for fingerprint in self.stage.data}
        progress = asdict(self.state) | {"skips": self.context.health.skips, "data": data}
        return {"progress": progress, **self.stage.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        progress = dict(state["progress"])
        skips = progress.pop("skips")
        progress.pop("data", None)  # compared in ``resume``
        self.state = TrainState(**progress)
        self.state.select_by(self.selection.rule)
        self.context.health.restore(skips, self.state.step + 1)
        self.stage.load_state_dict({name: part for name, part in state.items() if name != "progress"})
