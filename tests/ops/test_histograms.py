"""Tests the counts of values in bins against NumPy's."""

import math

import numpy as np
import pytest
import torch

from ppo_ds.ops.histograms import RATIO_EDGES, count_bins, count_equal_bins


def test_counts_by_hand():
    edges = torch.tensor([0.0, 1.0, 2.0, 3.0])
    values = torch.tensor([[-5.0, 0.0, 0.5, 1.0], [2.9, 3.0, 99.0, math.nan]])
    assert count_bins(values, edges).tolist() == [3, 1, 3]
    mask = torch.tensor([[False, True, True, True], [True, False, False, True]])
    assert count_bins(values, edges, mask).tolist() == [2, 1, 1]
    assert count_bins(values, edges, mask & False).tolist() == [0, 0, 0]
    assert count_bins(torch.tensor([math.inf, -math.inf]), edges).tolist() == [1, 0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_equal_bins_are_those_of_numpy(seed):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    counts, edges = count_equal_bins(values, bins=20)
    expected, expected_edges = np.histogram(values.numpy(), bins=20)
    assert counts.tolist() == expected.tolist()
    np.testing.assert_allclose(edges.numpy(), expected_edges, rtol=1e-12)


def test_equal_values_and_none_at_all():
    counts, edges = count_equal_bins(torch.tensor([2.0, math.nan, 2.0, math.inf]))
    assert (counts.tolist(), edges.tolist()) == ([2], [1.5, 2.5])
    counts, edges = count_equal_bins(torch.tensor([math.nan]))
    assert len(counts) == len(edges) == 0


def test_the_sum_over_parts_is_the_whole():
    """Micro-batches and ranks add their counts."""
    ratios = torch.rand(64, 7, generator=torch.Generator().manual_seed(1)) * 2.5
    mask = torch.rand(64, 7, generator=torch.Generator().manual_seed(2)) > 0.3
    edges = torch.tensor(RATIO_EDGES)
    parts = [count_bins(*pair) for pair in zip(ratios.split(10), [edges] * 7, mask.split(10), strict=True)]
    whole = count_bins(ratios, edges, mask)
    assert torch.equal(sum(parts), whole) and whole.sum() == mask.sum()
