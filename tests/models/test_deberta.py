"""Relative positions of DeBERTa equal those of transformers, bit for bit."""

import importlib.util

import pytest
import torch
from transformers.models.deberta_v2 import modeling_deberta_v2

from ppo_ds.models.deberta import log_bucket_positions


@pytest.fixture(scope="module")
def original():
    """Loads a second copy of the module of transformers, whose function is not replaced."""
    spec = importlib.util.spec_from_file_location(
        "transformers.models.deberta_v2.unchanged", modeling_deberta_v2.__file__
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_log_bucket_position


@pytest.mark.parametrize("buckets, positions", [(8, 64), (32, 512), (256, 512)])
def test_equals_transformers(original, buckets, positions):
    relative = torch.arange(-600, 601)
    ours, theirs = (compute(relative, buckets, positions) for compute in (log_bucket_positions, original))
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
