"""Tests that baseline.py finds every kind of difference between two recordings."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file

from tests.support.environment import run_python
from tests.tools import baseline

RECORD = {
    "metrics": [{"step": "1", "policy/loss": (0.5).hex()}, {"step": "2", "policy/loss": (0.25).hex()}],
    "tensors": {"model/model.safetensors:a": "00", "model/model.safetensors:b": "11"},
}


def test_equal_records_have_no_difference():
    assert baseline.difference(RECORD, copy.deepcopy(RECORD)) is None


@pytest.mark.parametrize(
    ("section", "index", "key", "value", "told"),
    [
        ("metrics", 1, "policy/loss", (0.25 + 2**-54).hex(), "2 policy/loss: 0.25 -> 0.25000000000000006"),
        ("metrics", 0, "policy/loss", None, "step 1 policy/loss: 0.5 -> absent"),
        ("metrics", 0, "policy/new", (1.0).hex(), "step 1 policy/new: absent -> 1.0"),
        ("tensors", None, "model/model.safetensors:b", "12", "model.safetensors:b: other content (1 of 2"),
        ("tensors", None, "model/model.safetensors:b", None, "model.safetensors:b: missing (1 of 2"),
        ("tensors", None, "model/model.safetensors:c", "22", "model.safetensors:c: new (1 of 3"),
    ],
)
def test_the_first_difference_is_named(section, index, key, value, told):
    other = copy.deepcopy(RECORD)
    entries = other[section] if index is None else other[section][index]
    entries.pop(key, None)
    if value is not None:
        entries[key] = value
    assert told in baseline.difference(RECORD, other)


def test_a_missing_step_is_a_difference():
    shorter = {**RECORD, "metrics": RECORD["metrics"][:1]}
    assert baseline.difference(RECORD, shorter) == "2 steps -> 1 steps"


def test_costs_are_not_compared_and_floats_keep_every_bit():
    line = {"step": 3, "time": 0.9, "time/step": 0.1, "perf/mfu_actor": 0.2, "mem/host_rss_gb": 1.0}
    found = baseline.compared({**line, "health/rank_time_spread_s": 0.0, "policy/loss": 0.1, "kl/coef": None})
    assert found == {"step": "3", "policy/loss": "0x1.999999999999ap-4", "kl/coef": "None"}


def test_a_tensor_is_hashed_by_type_shape_and_content_alone(tmp_path):
    weight = torch.arange(6.0)
    variants = {
        "same": (weight.clone(), {"other": "metadata"}),
        "bit": (weight + torch.tensor([0, 0, 0, 0, 0, 5e-7]), None),
        "shape": (weight.reshape(2, 3), None),
        "type": (weight.to(torch.int32), None),
    }
    save_file({"x": weight, "y": torch.zeros(2)}, tmp_path / "first.safetensors")
    first = dict(baseline.tensor_hashes(tmp_path / "first.safetensors"))
    assert set(first) == {"x", "y"}
    for name, (tensor, metadata) in variants.items():
        save_file({"x": tensor}, tmp_path / f"{name}.safetensors", metadata)
        hashes = dict(baseline.tensor_hashes(tmp_path / f"{name}.safetensors"))
        assert (hashes["x"] == first["x"]) == (name == "same"), name


def test_an_unknown_run_is_a_mistake_of_the_user(tmp_path):
    done = run_python(baseline.__file__, "record", str(tmp_path / "file"), "--only", "nothing")
    assert done.returncode == 2 and "--only: no such run: nothing" in done.stderr
    assert not (tmp_path / "file").exists()
