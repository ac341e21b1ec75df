"""Holds the entry point of the installed commands, such as ppo-ds-train for launch/train.py.

``setup.py`` installs the repository's folders ``launch`` and ``conf`` into this package. In a checkout, and
after ``pip install -e .``, they are at the top of the repository.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALLED = (HERE / "launch").is_dir()
LAUNCH = (HERE if INSTALLED else HERE.parents[1]) / "launch"
PREFIX = "ppo-ds-"


def main() -> None:
    """Runs launch/NAME.py as the main program, where ppo-ds-NAME is the name of the started command."""
    name = Path(sys.argv[0]).stem.removeprefix(PREFIX)
    runpy.run_path(str(LAUNCH / f"{name}.py"), run_name="__main__")


def script(name: str) -> str:
    """Returns the script that a launcher such as deepspeed or torchrun starts for the command ``name``."""
    return f"$(which {PREFIX}{name})" if INSTALLED else f"launch/{name}.py"


def command(name: str) -> str:
    """Returns the command line that starts ``name``: python launch/NAME.py, or ppo-ds-NAME if installed."""
    return f"{PREFIX}{name}" if INSTALLED else f"python {script(name)}"


def with_commands(text: str) -> str:
    """Replaces every ``python launch/NAME.py`` in a help text by the result of ``command``."""
    return re.sub(r"python launch/(\w+)\.py", lambda found: command(found[1]), text)
