"""Tests running moments against numpy on all values at once."""

import numpy as np
import pytest
import torch

from ppo_ds.ops.running import RunningMoments


def test_batches_merge_to_the_moments_of_all():
    # far from 0, where cancellation would show
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1e4
    moments = RunningMoments()
    for part in x.split([1, 2, 397, 600]):
        moments.update(part)
    assert moments.mean == pytest.approx(np.mean(x.numpy()), rel=1e-14)
    assert moments.std == pytest.approx(np.std(x.numpy()), rel=1e-10)


def test_two_ranks_count_as_one():
    """Each rank updates with 2 numbers; ``reduce`` adds the sums of the simulated other rank."""
    mine, other = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])
    sent = iter([torch.tensor([2.0, 12.0]), (other.double() - 4).square().sum().reshape(1)])
    moments = RunningMoments()
    moments.update(mine, reduce=lambda t: t + next(sent))
    assert (moments.count, moments.mean, moments.std) == (4, 4.0, pytest.approx(5**0.5))


@pytest.mark.parametrize("batches", [[], [[]], [[2.0]], [[2.0, 2.0], [2.0]]])
def test_values_without_variance_are_not_divided(batches):
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch))
    assert moments.std == 1.0
    assert moments.normalize(torch.tensor([3.0])).item() == 3.0 - moments.mean


def test_the_state_is_restored():
    moments, other = RunningMoments(), RunningMoments()
    moments.update(torch.tensor([1.0, 2.0, 4.0]))
    other.load_state_dict(moments.state_dict())
    for each in (moments, other):
        each.update(torch.tensor([9.0]))
    assert other.state_dict() == moments.state_dict()
