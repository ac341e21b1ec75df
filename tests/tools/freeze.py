"""Freezes what users see of configs, errors and help pages, and compares other code with it.

    python tests/tools/freeze.py record FILE [--lines ARGV.jsonl]
    python tests/tools/freeze.py compare FILE [configs] [errors] [help]

``record`` writes to FILE the resolved config of every experiment and pipeline, the help page of every
command, and the outcome of each command line of ARGV.jsonl: its error lines, or "valid". A line of that file
is one JSON object {"argv": [...], "ranks": N}. ``compare`` prints every difference of this working tree and
exits with 1 if there is any. Both use the command line only; tests/tools/baseline.py does the same for
numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path.cwd()
sys.path.insert(0, str(ROOT))
PARTS = ("configs", "errors", "help")


def output(*command: str) -> str:
    environment = os.environ | {"COLUMNS": "110", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    text = done.stdout + done.stderr + (f"exit code {done.returncode}\n" if done.returncode else "")
    return text.replace(str(ROOT), "ROOT")


def configs() -> dict[str, str]:
    """Returns the resolved config of every experiment and pipeline as YAML."""
    names = {
        f"{command} +{group}={file.stem}": (f"launch/{command}.py", f"+{group}={file.stem}", "--cfg", "job")
        for command, group in (("train", "experiment"), ("pipeline", "pipeline"))
        for file in sorted((ROOT / "conf" / group).glob("*.yaml"))
    }
    return {name: output(*command) for name, command in names.items()}


def help_pages() -> dict[str, str]:
    """Returns the help page of every command, and of every section of the config."""
    commands = sorted(file.stem for file in (ROOT / "launch").glob("*.py") if "__main__" in file.read_text())
    pages = {name: output(f"launch/{name}.py", "--help") for name in commands}
    for section in ("algo", "algo.policy", "algo.kl", "rollout", "run", "actor.optim", "data", "reward"):
        pages[f"train --help {section}"] = output("launch/train.py", "--help", section)
    return pages


def outcomes(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the error lines of each command line, or "valid"."""
    from launch.cli import load_config
    from ppo_ds.errors import UserError

    found = {}
    for line in lines:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                load_config(list(line["argv"]), world_size=line["ranks"])
            text = "valid"
        except UserError as error:
            text = "\n".join(error.problems)
        except SystemExit:
            text = "exit"
        except Exception as error:
            text = f"TRACEBACK {type(error).__name__}: {error}"
        found[json.dumps(line)] = text.replace(str(ROOT), "ROOT")
    return found


def record(file: Path, lines: Path | None) -> None:
    rows = [json.loads(text) for text in dict.fromkeys(lines.read_text().splitlines())] if lines else []
    rows = [row for row in rows if not any("/tmp" in word or "pytest" in word for word in row["argv"])]
    content = {"configs": configs(), "help": help_pages(), "errors": outcomes(rows)}
    file.write_text(json.dumps(content, indent=1) + "\n")
    print({name: len(part) for name, part in content.items()})


def compare(file: Path, parts: list[str]) -> bool:
    frozen, same = json.loads(file.read_text()), True
    for part in parts:
        old = frozen[part]
        if part == "errors":
            new = outcomes([json.loads(key) for key in old])
        else:
            new = {"configs": configs, "help": help_pages}[part]()
        changed = [name for name in old | new if old.get(name) != new.get(name)]
        for name in changed:
            before, after = (texts.get(name, "(absent)").splitlines() for texts in (old, new))
            print(f"== {part}: {name}")
            print("\n".join(list(difflib.unified_diff(before, after, "frozen", "now", lineterm="", n=0))[2:]))
        print(f"{part}: {len(old)} frozen, {len(changed)} differ")
        same = same and not changed
    return same


def main(argv: list[str]) -> int:
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=verbatim)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--lines", type=Path)
    options = parser.parse_args(argv)
    if options.command == "record":
        record(options.file, options.lines)
        return 0
    return 0 if compare(options.file, options.parts or list(PARTS)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
