"""Tests the limit of open files, in processes that start with low limits."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.support.environment import ROOT

# Sets the limits given as arguments, calls the function for a number of ranks, and then opens files.
SCRIPT = """
import os, resource, sys
soft, hard, ranks, files = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from ppo_ds.distributed.open_files import raise_open_files_limit
from ppo_ds.errors import UserError
try:
    raise_open_files_limit(ranks)
except UserError as error:
    print(error)
    sys.exit(2)
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(files)]
child = os.popen("ulimit -Sn").read().strip()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), child)
"""


def limited(soft: int, hard: int, ranks: int, files: int = 0) -> tuple[int, str]:
    """Returns the exit code and the output of SCRIPT."""
    numbers = [str(number) for number in (soft, hard, ranks, files)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *numbers], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout.strip() + done.stderr.strip()


@pytest.fixture(autouse=True)
def own_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip(f"the hard limit of open files is {hard}")


def test_the_soft_limit_becomes_the_hard_limit_for_this_process_and_its_children() -> None:
    assert limited(64, 3000, ranks=8, files=1000) == (0, "3000 3000 3000")


def test_a_higher_soft_limit_stays() -> None:
    assert limited(3000, 3000, ranks=8) == (0, "3000 3000 3000")


def test_a_hard_limit_that_is_too_low_for_the_ranks_is_an_error_in_one_line() -> None:
    # 5 per rank and 128 others
    assert limited(1024, 2688, ranks=512) == (0, "2688 2688 2688")
    code, output = limited(1024, 2687, ranks=512)
    assert code == 2 and output.startswith(
        "ulimit -Hn=2687: the hard limit of open files is too low for 512 ranks, each of which may open "
        "2688; raise it on each node ("
    )
    assert len(output.splitlines()) == 1
