"""Fixture of the fault tests: a folder with tiny models and prompts."""

from pathlib import Path

import pytest

from tests.invariant import invariant_assets


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    invariant_assets.make(root)
    return root
