"""How tests are shared out among pytest-xdist's workers (``make test`` uses two): whole files, since they hold what they start and load."""

from __future__ import annotations

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # a worker for each core


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.parent.name
        # the files of tests/invariant read the same few runs
        item.add_marker(pytest.mark.xdist_group(folder if folder == "invariant" else item.path.name))
