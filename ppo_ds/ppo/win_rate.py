"""Win rate of the policy against the reference: compares the rewards of responses to held-out prompts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_ds.distributed.world import World
from ppo_ds.ops.outcomes import WORTH, outcome_shares
from ppo_ds.storage.drafts import write_file
from ppo_ds.storage.reading import read_json
from ppo_ds.types import Prompts, Rollout

log = logging.getLogger(__name__)
FILE = "eval_reference.json"  # in the run directory
KEPT = ("prompt", "response", "score")  # keys of a sample row that the file keeps
Rows = Sequence[dict[str, Any]]


@dataclass(kw_only=True)
class ReferenceResponses:
    """The reference's responses to the held-out prompts with their scores, computed once per run.

    If the reference has the initial weights of the actor, an evaluation before the first step provides the
    responses. Otherwise the reference generates them. A file in the run directory keeps them for a resume.
    """

    file: Path
    # file of the run from whose checkpoint this run starts, if in another directory
    earlier: Path | None = None
    settings: dict[str, Any]  # JSON: settings that affect responses and scores
    world: World
    is_initial_actor: bool  # whether the reference has the initial weights of the actor
    # generates responses to batches of prompts; None if no separate reference model is loaded
    generate: Callable[[Sequence[Prompts]], list[Rollout]] | None
    rows: Rows | None = field(init=False, default=None)
    warned: bool = field(init=False, default=False)

    def find(self, prompts: Sequence[str]) -> Rows | None:
        """Returns the stored rows if their prompts equal ``prompts``, else None. All ranks must call this."""
        if self.rows is None:
            self.rows = self.world.gather_objects(self._read() if self.world.is_main else None)[0]
        if self.rows is None or [row["prompt"] for row in self.rows] != list(prompts):
            return None
        return self.rows

    def keep(self, rows: Rows) -> Rows:
        """Stores the keys KEPT of ``rows`` for later evaluations, also after a resume, and returns these.

        Every rank must pass the rows of all ranks.
        """
        self.rows = [{key: row[key] for key in KEPT} for row in rows]
        if self.world.is_main:
            self._write(self.rows)
        return self.rows

    def warn(self) -> None:
        """Logs once that the win rate cannot be measured."""
        if not self.warned and self.world.is_main:
            log.warning(
                "warning: eval/win_rate_vs_ref is not measured: %s has no responses of the initial policy to "
                "these prompts with these settings, and no reference with its own weights is loaded",
                self.file,
            )
        self.warned = True

    def _read(self) -> Rows | None:
        """Returns the rows in this run's file, else those in the earlier run's, after a copy, else None."""
        known = json.loads(json.dumps(self.settings, default=str))
        for file in filter(None, (self.file, self.earlier)):
            try:
                content = read_json(file)
                rows = [{key: row[key] for key in KEPT} for row in content["rows"]]
                is_known = content["settings"] == known
            except (OSError, ValueError, TypeError, LookupError):  # no file, or a damaged one
                continue
            if is_known:
                if file is self.earlier:
                    self._write(rows)
                return rows
        return None

    def _write(self, rows: Rows) -> None:
        content = {"settings": self.settings, "rows": rows}
        write_file(self.file, json.dumps(content, ensure_ascii=False, default=str))


def win_rate(rows: Rows, others: Rows) -> float:
    """Returns the share of ``rows`` whose score is above that of the row at the same index of ``others``.

    Ties count half; equal responses are ties (ops/outcomes.py).
    """
    wins = 0.0
    for own, other in zip(rows, others, strict=True):
        shares = outcome_shares([own["score"]], [other["score"]], [own["response"]], [other["response"]])
        wins += sum(share * worth for share, worth in zip(shares, WORTH, strict=True))
    return wins / len(rows)
