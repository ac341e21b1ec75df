"""Runs the commands of the pages that have the comment RUNS above their code block.

They run in the order of the pages below, in one empty directory with links to the folders of the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, RUNS, Block, blocks, pages

# The page whose commands create the model and the data for all others.
FIRST = ROOT / "docs" / "recipes" / "README.md"
# The model that `make quickstart` would train in minutes; the untrained one of FIRST takes its place.
QUICKSTART = Path("outputs/quickstart/sft/model")
LIMIT = 600  # seconds of one block


def running_blocks() -> list[Block]:
    ordered = sorted(pages(), key=lambda page: (page != FIRST, page.parent != FIRST.parent, page))
    return [block for page in ordered for block in blocks(page) if block.runs]


def test_a_block_below_a_running_block_does_not_run_itself(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{RUNS}\n```bash\ntrue\n```\n\n```text\noutput\n```\n\n{RUNS}\n\n```bash\ntrue\n```\n")
    assert [(block.lines, block.runs) for block in blocks(page)] == [
        (("true",), True),
        (("output",), False),
        (("true",), True),
    ]


@pytest.mark.slow
def test_the_commands_of_the_pages_run(tmp_path: Path) -> None:
    for name in ("benchmarks", "conf", "docs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    found = running_blocks()
    assert len(found) >= 15
    for block in found:
        if (tmp_path / "tiny" / "model").exists():
            shutil.copytree(tmp_path / "tiny" / "model", tmp_path / QUICKSTART, dirs_exist_ok=True)
        started = time.monotonic()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(block.lines)],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        output = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert done.returncode == 0, f"{block.name} ended with {done.returncode}:\n{output}"
        print(f"{block.name}: {time.monotonic() - started:.1f} s")
