"""Tests that relative positions of DeBERTa are bit-identical to those of transformers."""

import ast
from pathlib import Path

import pytest
import torch
from transformers.models.deberta_v2 import modeling_deberta_v2

from ppo_ds.models.value import log_bucket_positions


@pytest.fixture(scope="module")
def original():
    """Returns transformers' function from its source, since the module's own may have been replaced."""
    tree = ast.parse(Path(modeling_deberta_v2.__file__).read_text())
    body = [node for node in tree.body if getattr(node, "name", None) == "make_log_bucket_position"]
    namespace = {"torch": torch}
    exec(compile(ast.Module(body, type_ignores=[]), "modeling_deberta_v2", "exec"), namespace)
    return namespace["make_log_bucket_position"]


@pytest.mark.parametrize("buckets, positions", [(8, 64), (32, 512), (256, 512)])
def test_equals_transformers(original, buckets, positions):
    relative = torch.arange(-600, 601)
    ours, theirs = (compute(relative, buckets, positions) for compute in (log_bucket_positions, original))
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
