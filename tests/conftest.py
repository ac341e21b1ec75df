"""Settings of the whole suite: one thread in each test process, and which tests share a process of `pytest -n`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import RankServer

# Child processes compute with one thread too, unless a test says otherwise: on a loaded machine, threads that wait for
# one another cost minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
# Folders whose session fixtures launch processes for the tests of several files.
ONE_GROUP = {"invariant"}
# The longest groups start first, so that no process is left with one of them at the end.
LONGEST_FIRST = ("invariant", "faults", "integration", "engine")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Sets the limit before each test, because code under test may change it. Does not import torch for this."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Puts the tests of a file into one group, so that each module fixture is made once; see ONE_GROUP.

    Not in pytest_collection_modifyitems: pytest-xdist reads the groups there before this file could set them.
    """
    folder, file = _place(item)
    item.add_marker(pytest.mark.xdist_group(folder if folder in ONE_GROUP else f"{folder}/{file}"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {folder: rank for rank, folder in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(_place(item)[0], len(ranks)))


def _place(item: pytest.Item) -> tuple[str, str]:
    """Returns the folder below tests/ and the name of the file."""
    *folders, file = item.path.relative_to(TESTS).parts
    return (folders[0] if folders else ""), file


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Starts process groups of ranks without importing anything again."""
    with RankServer(tmp_path_factory.mktemp("ranks")) as server:
        yield server
