"""Runs one rank without models: rank 1 is busy, and rank 0 waits for it in a collective.

Python runs no signal handler inside the collective. The script is started by launchers.
``fault_stopping_worker.py FOLDER`` writes ``ready<rank>`` (its process id and the ids of its launchers) and
``left<rank>`` (whether the rank received the stop request).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ppo_ds.distributed.launcher import launcher_pids
from ppo_ds.distributed.store import RankStore
from ppo_ds.distributed.watchdog import Watchdog
from ppo_ds.distributed.world import connect
from ppo_ds.run.stopping import Abandoned, StopRequest

BUSY = 90.0  # seconds that rank 1 is busy, unless a stop request arrives


def main() -> None:
    folder = Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
    world, watch = connect(5.0), Watchdog()
    notices = RankStore()
    watch.start(world, notices)
    stop = StopRequest(world, None, notices)
    watch.add_callback(stop.poll)
    stop.install_handlers()
    world.barrier()
    (folder / f"ready{world.rank}").write_text(json.dumps([os.getpid(), *launcher_pids()]))
    if world.rank == 1:
        until = time.monotonic() + BUSY
        while not stop.should_stop() and time.monotonic() < until:
            time.sleep(0.02)
    try:
        stop.raise_if_stopped()
        told = False
    except Abandoned:
        told = True
    (folder / f"left{world.rank}").write_text(json.dumps(told))
    world.barrier()
    watch.stop()
    world.close()
    os._exit(143)


if __name__ == "__main__":
    main()
