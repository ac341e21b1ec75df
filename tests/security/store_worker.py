"""Connects to the other ranks, starts the watchdog and waits, while an outsider tries to end the run.

The argument is a folder. Each rank creates ready_RANK, waits for the file ``go``, and then creates
finished_RANK.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch.process import prepare_environment

LIMIT = 120.0  # seconds to wait for the file


def main(folder: Path) -> None:
    prepare_environment(verbose=False)
    from ppo_ds.distributed.exit import exit_now
    from ppo_ds.distributed.store import RankStore
    from ppo_ds.distributed.watchdog import Watchdog
    from ppo_ds.distributed.world import connect

    world = connect(timeout_minutes=2.0)
    watchdog = Watchdog()
    watchdog.start(world, RankStore())
    (folder / f"ready_{world.rank}").touch()
    deadline = time.monotonic() + LIMIT
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    (folder / f"finished_{world.rank}").touch()
    world.barrier()
    watchdog.stop()
    world.close()
    exit_now(0)


if __name__ == "__main__":
    main(Path([argument for argument in sys.argv[1:] if not argument.startswith("--")][0]))
