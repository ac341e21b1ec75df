"""Tests NF4 weights under an adapter on 2 ranks: training at ZeRO 0 to 2, resume, export, decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_checkpoint import launch
from tests.engine.test_lora_engines import make_models
from tests.support.ranks import RankServer

pytest.importorskip("bitsandbytes", reason="the extra bitsandbytes is not installed")


def test_training_resume_and_export(tmp_path: Path, rank_server: RankServer) -> None:
    """The counts are those of a model without quantization: 3,712 in adapters, 62,976 in the base."""
    make_models(tmp_path, width=64)  # blocks have 64 weights
    *cases, others = launch(rank_server, 2, tmp_path, "all", "quantized_worker")
    assert len(cases) == 5
    for case in cases:
        exact = 1e-4 if "fp32" in case["case"] else 0.1  # a merged weight is rounded to bf16
        assert case["shared"] and case["codes"] and case["resumed"] and case["adapters only"], case
        assert case["read"], case  # as launch/export.py does
        assert case["moved"] > 0.1 and case["exported gap"] < exact, case
        assert case["decoded gap"] < exact, case
    assert {tuple(case["counts"]) for case in cases} == {(3712, 3712 + 62976)}
    assert others["learns"] and others["values"] and others["frozen"] and others["gap"] < 1e-5, others
