"""Limits the test process to one thread: on a loaded machine, threads that wait for one another cost minutes."""

import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Sets the limit before each test, because code under test may change it. Tests that do not need torch do not import it for this."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
