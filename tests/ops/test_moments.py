"""Tests running moments against numpy on all values at once."""

import numpy as np
import pytest
import torch

from ppo_ds.ops.moments import RunningMoments


def test_batches_merge_to_the_moments_of_all():
    # far from 0, where cancellation would show
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1e4
    moments = RunningMoments()
    for part in x.split([1, 2, 397, 600]):
        moments.update(part)
    assert moments.mean == pytest.approx(np.mean(x.numpy()), rel=1e-14)
    assert moments.std == pytest.approx(np.std(x.numpy()), rel=1e-10)


@pytest.mark.parametrize("batches", [[], [[]], [[2.0]], [[2.0, 2.0], [2.0]]])
def test_values_without_variance_are_not_divided(batches):
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch))
    assert moments.std == 1.0
    assert moments.normalize(torch.tensor([3.0])).item() == 3.0 - moments.mean
