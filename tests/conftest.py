"""Configures the suite: one thread per test process, and groups of tests that share a `pytest -n` process."""

import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Ranks
from tests.support.ranks import RankServer

# Child processes compute with one thread too, unless a test says otherwise: on a loaded machine, threads that
# wait for one another cost minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CACHE_ROOT", os.path.join(tempfile.gettempdir(), "ppo_ds_tests_vllm"))

TESTS = Path(__file__).parent
# Folders whose session fixtures launch processes for the tests of several files.
ONE_GROUP = {"gpu_sim", "invariant"}
# Folders whose slow tests start several ranks, which need both cores of the machine.
WITH_RANKS = {
    *("invariant", "faults", "integration", "engine", "finetune", "ppo", "rollout", "distributed"),
    *("assemble", "run"),
}
# The longest groups start first, so that no process is left with one of them at the end.
LONGEST_FIRST = ("invariant", "faults", "integration", "engine", "docs", "benchmarks", "image", "tools")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Sets torch to one thread before each test, because code under test may change it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


# With another handler, a later test ends this process: Python ignores SIGPIPE, so that a write to a closed
# connection raises an exception.
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fails a test that leaves a signal handler of its own, and restores the handler."""
    yield
    changed = [number for number, handler in HANDLERS.items() if signal.getsignal(number) != handler]
    for number in changed:
        signal.signal(number, HANDLERS[number])
    assert not changed, f"the test has changed the handlers of {[number.name for number in changed]}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assigns each file, and each folder of ONE_GROUP, to one process, so that it creates fixtures once.

    The marker xdist_group has no effect with pytest 9.2 and pytest-xdist 3.8.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            folder = file.removeprefix("tests/").split("/", 1)[0]
            return folder if folder in ONE_GROUP else file

    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and _place(item)[0] in WITH_RANKS:
            item.add_marker("ranks")
    ranks = {folder: rank for rank, folder in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(_place(item)[0], len(ranks)))


def _place(item: pytest.Item) -> tuple[str, str]:
    """Returns the folder below tests/ and the file name of a test."""
    *folders, file = item.path.relative_to(TESTS).parts
    return (folders[0] if folders else ""), file


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Provides a server that starts groups of ranks without importing the libraries again."""
    with RankServer(tmp_path_factory.mktemp("ranks")) as server:
        yield server


@pytest.fixture(scope="session")
def ranks(rank_server: RankServer) -> Ranks:
    """Runs launch/train.py on ranks of the server."""
    return Ranks(rank_server)


@pytest.fixture
def all_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the checks of a config find the packages of the extras bitsandbytes and reasoning-gym."""
    for checks in ("models", "data"):
        monkeypatch.setattr(f"ppo_ds.config.checks.{checks}.find_spec", lambda name: True)
