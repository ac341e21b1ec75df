"""Takes the lock of a run directory in a separate process: ``lock_worker.py RUN_DIR``.

Prints "held" or the refusal, holds the lock until a line arrives on stdin, and releases it. Further lines on
stdin: "ending" marks the lock, "fork" starts a child, "leave" ends the process without a release.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppo_ds.errors import UserError
from ppo_ds.storage import run_lock


def main() -> None:
    try:
        lock = run_lock.acquire(Path(sys.argv[1]), notice=lambda line: print(line, flush=True))
    except UserError as error:
        print(f"refused: {error}", flush=True)
        return
    print("held", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "ending":
                lock.mark_ending()
                print("marked", flush=True)
            case "fork":
                if (child := os.fork()) == 0:
                    lock.release()
                    time.sleep(1000)
                print(child, flush=True)
            case "leave":
                os._exit(0)
            case _:
                break
    lock.release()


if __name__ == "__main__":
    main()
