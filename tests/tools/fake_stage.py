"""Stands in for launch/train.py in tests of pipelines: fake_stage.py RUN_DIR SETTINGS INPUT

Appends the name of the run directory to the file ``starts`` beside it. The file RUN_DIR.action says how it
ends; without the file it trains: its model is the text of INPUT and the name of the directory.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(run_dir: Path, settings: Path, read: str) -> int:
    with (run_dir.parent / "starts").open("a") as file:
        file.write(f"{run_dir.name}\n")
    action_file = run_dir.with_name(f"{run_dir.name}.action")
    action = action_file.read_text() if action_file.exists() else "done"
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(settings.read_text())
    match action:
        case "fail":
            return 3
        case "no result":
            return 0
        case "ranks":  # the launcher is ended by a signal at once, its ranks save first
            subprocess.Popen([sys.executable, __file__, str(run_dir)])
            time.sleep(60)
        case "time_limit":
            write_summary(run_dir, action)
            return 0
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    (run_dir / "model").mkdir(exist_ok=True)
    given = Path(read).read_text() if read else ""
    (run_dir / "model" / "config.json").write_text(f"{given}{run_dir.name};")
    write_summary(run_dir, "done")
    return 0


def rank(run_dir: Path) -> None:
    def stop(*_: object) -> None:
        time.sleep(0.5)
        write_summary(run_dir, "signal")
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)
    launcher = os.getppid()
    (run_dir / "ready").touch()
    while os.getppid() == launcher:
        time.sleep(0.02)
    stop()


def write_summary(run_dir: Path, reason: str) -> None:
    draft = run_dir / "summary.tmp"
    draft.write_text(json.dumps({"exit_reason": reason}))
    draft.rename(run_dir / "summary.json")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        rank(Path(sys.argv[1]))
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
