"""Counts skipped optimizer steps. All ranks make the same decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SkippedStep:
    """An optimizer step that was skipped; subclasses add what the stage's ``dump_failure`` needs."""

    what: tuple[str, ...]  # such as "loss of the actor" or "gradient of the critic"


class TooManySkips(Exception):
    """Raised on all ranks at the same point after health.max_skips skipped optimizer steps in a row."""

    def __init__(self, skipped: SkippedStep):
        super().__init__(" and ".join(skipped.what))
        self.last_skip: Any = skipped  # an instance of the stage's subclass of SkippedStep


@dataclass
class Health:
    """Counts consecutive skipped optimizer steps; a stage may record several skips as one."""

    max_skips: int
    skips: int = 0  # consecutive skips so far
    step: int = 1  # the training step in progress
    since: int | None = None  # training step of the first of these skips; None if it was before a resume
    reasons: list[str] = field(default_factory=list)  # reasons since the last ``take_reasons``

    def set_step(self, step: int) -> None:
        self.step = step

    def record_step(self) -> None:
        self.skips = 0

    def record_skip(self, skipped: SkippedStep, counted: bool = True) -> None:
        """Records a skipped optimizer step; raises TooManySkips at the limit.

        ``counted=False`` is for overflows while the loss scale is still adapting.
        """
        self.reasons += skipped.what
        self.since = self.since if self.skips else self.step
        self.skips += counted
        if self.skips >= self.max_skips:
            raise TooManySkips(skipped)

    def limit_reached(self, step: int) -> str:
        """Returns the error message for a run that reaches the limit of skips in ``step``."""
        earlier = self.since is not None and self.since < step
        began = f"; the first of these was in step {self.since}" if earlier else ""
        return f"no optimizer step was made {self.max_skips} times in a row (health.max_skips){began}"

    def take_reasons(self) -> list[str]:
        """Returns the distinct reasons since the last call, in the order of their first occurrence."""
        taken, self.reasons = list(dict.fromkeys(self.reasons)), []
        return taken

    def restore(self, skips: int, step: int) -> None:
        """Sets the count from a checkpoint; ``step`` is the next training step."""
        self.skips, self.step, self.since = skips, step, None
