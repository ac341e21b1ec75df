"""Runs launch/train.py on ranks that are forked from a process with all imports done.

    run = ranks.start(2, ["run.dir=...", ...], fault="kill@checkpoint.before:at=2")
    os.kill(run.pids[1], signal.SIGKILL)
    assert ranks.wait(run) == [-9, -9]

The variable NAN in a run's environment makes numbers NaN; see tests/faults/injection.py.
"""

from __future__ import annotations

import importlib
import os
import sys

from tests.support.ranks import RankGroup as Run
from tests.support.ranks import RankServer

SHARD_BYTES = 30_000  # so that both ranks of a tiny model write

__all__ = ["Ranks", "Run"]


class Ranks:
    """Starts runs of launch/train.py, or of another ``main`` that takes its arguments.

    Several runs may be started at once.
    """

    def __init__(self, server: RankServer, main: str = "launch.train:main"):
        self._server, self._main = server, main

    def start(self, ranks: int, arguments: list[str], *, fault: str | None = None, **environment: str) -> Run:
        more = environment | ({"PPO_DS_FAULT": fault} if fault else {})
        return self._server.start(f"{__name__}:train", ranks, self._main, *arguments, **more)

    def wait(self, run: Run) -> list[int]:
        """Returns the exit codes by rank; for a rank ended by a signal, minus the signal's number."""
        return self._server.wait(run)

    def run(
        self, ranks: int, arguments: list[str], *, fault: str | None = None, **environment: str
    ) -> tuple[list[int], str]:
        """Returns the exit codes and all that was printed."""
        run = self.start(ranks, arguments, fault=fault, **environment)
        return self.wait(run), run.output()


def train() -> int:
    """Runs one rank."""
    from ppo_ds.engine.checkpoint import shards

    shards.SHARD_BYTES = SHARD_BYTES
    if "NAN" in os.environ:
        from tests.faults.injection import injected

        for spec in os.environ["NAN"].split():
            setattr(*injected(spec))
    module, _, name = sys.argv[1].partition(":")
    return getattr(importlib.import_module(module), name)(sys.argv[2:])
