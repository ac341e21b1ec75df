"""Tests the exports of checkpoint.export_every with a stage that writes one file, and their size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from ppo_ds.engine.checkpoint.state import exported_bytes
from ppo_ds.errors import RunError
from ppo_ds.run.export import export_step
from tests.engine.test_checkpoint import OneRank


class Stage:
    """Exports a file with ``text``, then raises ``error`` if there is one."""

    text, error = "first", None

    def export(self, folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(self.text)
        if self.error is not None:
            raise self.error


def write(run_dir: Path, *steps: int, keep: int | None = None, stage: Any = None) -> list[str]:
    """Exports the steps in this order and returns the names in step_models, hidden ones included."""
    for step in steps:
        export_step(step, stage or Stage(), SimpleNamespace(run_dir=run_dir, world=OneRank()), keep)
    return sorted(path.name for path in (run_dir / "step_models").iterdir())


def test_all_or_the_newest_exports_are_kept(tmp_path: Path) -> None:
    assert write(tmp_path, 2, 4, 6) == ["step_000002", "step_000004", "step_000006"]
    assert write(tmp_path, 8, keep=2) == ["step_000006", "step_000008"]


def test_a_repeated_step_replaces_its_export_and_deletes_later_ones(tmp_path: Path) -> None:
    write(tmp_path, 2, 4, 6)
    stage = Stage()
    stage.text = "second"
    assert write(tmp_path, 4, keep=1, stage=stage) == ["step_000004"]
    assert (tmp_path / "step_models" / "step_000004" / "model" / "weights").read_text() == "second"


def test_a_folder_that_the_run_has_not_written_is_kept(tmp_path: Path, caplog: Any) -> None:
    """The user exports step 4 by hand, and renames the export of step 2."""
    write(tmp_path, 2)
    root = tmp_path / "step_models"
    (root / "step_000002").rename(root / "step_000002_good")
    by_hand = root / "step_000004" / "config.json"
    by_hand.parent.mkdir()
    by_hand.write_text("by hand")
    kept = ["step_000002_good", "step_000004"]
    assert write(tmp_path, 4, keep=1) == kept and by_hand.read_text() == "by hand"
    assert f"step 4 is not exported: {by_hand.parent} is not of this run" in caplog.text
    assert write(tmp_path, 6, 8, keep=1) == [*kept, "step_000008"] and by_hand.read_text() == "by hand"
    assert write(tmp_path, 2, keep=1) == ["step_000002", *kept]  # step 4 is a later step


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("os error 28")])
def test_an_export_that_fails_ends_the_run_and_leaves_the_folder_as_it_was(
    tmp_path: Path, error: Exception
) -> None:
    write(tmp_path, 2)
    stage = Stage()
    stage.text, stage.error = "second", error
    for step in (2, 4):
        with pytest.raises(
            RunError, match=f"step_models/step_00000{step} was not written: .*(No space|os error 28)"
        ):
            write(tmp_path, step, stage=stage)
    root = tmp_path / "step_models"
    assert [path.name for path in root.iterdir()] == ["step_000002"]
    assert (root / "step_000002" / "model" / "weights").read_text() == "first"


def test_the_bytes_of_an_export() -> None:
    """The moving average has all weights of its model; a lagging copy is not exported."""
    actor = SimpleNamespace(module=nn.Linear(4, 3).to(torch.bfloat16))  # 15 weights of 2 bytes
    critic = SimpleNamespace(module=nn.Linear(4, 1, bias=False))  # 4 weights of 4 bytes
    copies: Any = {"ema": SimpleNamespace(model=actor), "lagged": SimpleNamespace(model=actor)}
    models: Any = {"actor": actor, "critic": critic}
    assert (exported_bytes(models, {}), exported_bytes(models, copies)) == (46, 76)
