"""Marks the tests of this folder that start ranks as slow; the others run in the test process."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and "rank_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
