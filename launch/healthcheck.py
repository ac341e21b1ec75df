"""Checks the runs on this machine: python launch/healthcheck.py [--minutes 5]

The Docker image runs this check. A run holds the lock of its run directory open and renews it every few
seconds (ppo_ds/storage/run_lock.py). Exit code 1: a run has not renewed its lock for ``--minutes``, because
it is suspended or its file system does not answer. Exit code 0: every lock is fresh, or no run holds a lock
(before the config is read, in a dry run, and on every node but the first). If a run renews its lock but makes
no progress, its watchdog ends it after run.timeout_minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NAME = "run.lock"  # ppo_ds.storage.run_lock.NAME; nothing is imported, since the check runs every minute


def main(argv: list[str], proc: Path = Path("/proc")) -> int:
    parser = argparse.ArgumentParser(prog="launch/healthcheck.py", allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=5.0, help="time without renewal; default: 5")
    limit = 60 * parser.parse_args(argv).minutes
    locks = dict(held_locks(proc))
    stale = {path: age for path, age in locks.items() if age > limit}
    for path, age in stale.items():
        print(f"unhealthy: {path} has not been renewed for {age:.0f} s (limit: {limit:.0f} s)")
    if not stale:
        print(f"healthy: {len(locks)} run{'' if len(locks) == 1 else 's'}")
    return 1 if stale else 0


def held_locks(proc: Path) -> Iterator[tuple[str, float]]:
    """Yields each lock that a process of this user or container holds open, and its age in seconds."""
    for link in proc.glob("[0-9]*/fd/*"):
        try:
            path = os.readlink(link)
            if path.endswith(f"/{NAME}"):
                yield path, time.time() - link.stat().st_mtime
        except OSError:  # the process or its file is gone, or belongs to another user
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
