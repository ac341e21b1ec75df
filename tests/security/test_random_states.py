"""Tests that invalid random states of a checkpoint are refused before a generator takes them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from ppo_ds.engine.checkpoint.files import write_tensors
from ppo_ds.engine.rng import RandomStates, get_rng, load_rng, rng_file, save_rng
from tests.engine.test_checkpoint import OneRank
from tests.integration.launching import ROOT, TIMEOUT, environment

CASES = {
    "position": ("numpy", 0, 2_000_000_000),
    "position below 0": ("numpy", 0, -1),
    "position is a fraction": ("numpy", 0, 1.5),
    "position is no number": ("numpy", 0, "5"),
    "gauss flag": ("numpy", 1, 7),
    "gauss is no number": ("numpy", 2, float("nan")),
    "version of python": ("python", 0, 9),
    "next gauss": ("python", 1, "x"),
    "next gauss is empty": ("python", 1, {}),
}
TENSORS = {
    "too few words": ("numpy", torch.zeros(10, dtype=torch.int64)),
    "too many words": ("numpy", torch.zeros(625, dtype=torch.int64)),
    "two dimensions": ("numpy", torch.zeros(624, 2, dtype=torch.int64)),
    "negative words": ("numpy", torch.full((624,), -1, dtype=torch.int64)),
    "fractions": ("numpy", torch.full((624,), 0.5)),
    "python: too few words": ("python", torch.zeros(10, dtype=torch.int64)),
    "python: position": ("python", torch.full((625,), 2_000_000, dtype=torch.int64)),
    "python: negative": ("python", torch.full((625,), -1, dtype=torch.int64)),
    "torch: too short": ("torch", torch.zeros(10, dtype=torch.uint8)),
    "torch: invalid": ("torch", torch.full((5056,), 255, dtype=torch.uint8)),
}


def write(folder, states):
    write_tensors(rng_file(folder, 0), states.tensors, metadata={"rest": json.dumps(states.rest)})


@pytest.mark.parametrize("name", [*CASES, *TENSORS])
def test_an_invalid_state_is_refused_and_changes_nothing(tmp_path, name):
    world = OneRank()
    states = get_rng(world)
    tensors, rest = dict(states.tensors), json.loads(json.dumps(states.rest))
    if name in CASES:
        kind, index, value = CASES[name]
        rest[kind][index] = value
    else:
        kind, tensor = TENSORS[name]
        tensors[kind] = tensor
    write(tmp_path, RandomStates(tensors, rest))
    with pytest.raises(OSError, match=r"rng_rank_00000.safetensors: is damaged: .*; use another checkpoint"):
        load_rng(tmp_path, world)
    if kind == "numpy":
        assert np.random.get_state()[2] == states.rest["numpy"][0]


def test_a_draw_after_a_large_position_does_not_crash(tmp_path):
    """Runs in a separate process, because without the check the draw causes a segmentation fault."""
    world = OneRank()
    states = get_rng(world)
    rest = states.rest | {"numpy": [2_000_000_000, 0, 0.0]}
    write(tmp_path, RandomStates(states.tensors, rest))
    code = (
        "import sys, pathlib, numpy\nfrom ppo_ds.engine.rng import load_rng\n"
        "from tests.engine.test_checkpoint import OneRank\n"
        "try:\n    load_rng(pathlib.Path(sys.argv[1]), OneRank())\nexcept OSError:\n    print('refused')\n"
        "numpy.random.random()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "refused" in done.stdout, done


def test_valid_states_are_restored(tmp_path):
    world = OneRank()
    np.random.random(700), np.random.normal()
    save_rng(tmp_path, world)
    drawn = [np.random.normal(), float(torch.rand(()))]
    load_rng(tmp_path, world)
    assert [np.random.normal(), float(torch.rand(()))] == drawn
