"""Tests masked statistics: goldens, two ranks, hand-computed numbers, arbitrary values outside the mask."""

import pytest
import torch

from ppo_ds.ops.masked import masked_mean, masked_mean_var, masked_sum, masked_whiten
from tests.ops.by_name import normalize_advantages, on_ranks
from tests.ops.golden import Close, Within, assert_no_stale_entries, check, outputs


def rounded(actual):
    return Close(actual, 1e-7, "integer masks make n / (n - 1) a float32 number; means divide by n + 1e-8")


def whitened(**options):
    return lambda c: rounded(Within(masked_whiten(c.x, c.mask, **options), c.mask))


def row_by_row(c):
    rows = [masked_whiten(x[None], m[None], unbiased=False) for x, m in zip(c.x, c.mask, strict=True)]
    return rounded(torch.cat(rows))


def shards(c):
    return list(zip(c.x.split(c.rank_rows), c.mask.split(c.rank_rows), strict=True))


def global_statistic(which, all_places=False):
    def statistic(c):
        def work(rank, reduce):
            x, mask = shards(c)[rank]
            return masked_mean_var(
                x, torch.ones_like(mask) if all_places else mask, unbiased=False, reduce=reduce
            )[which]

        return Close(torch.stack(on_ranks(2, work)), 1e-10 if all_places else 2e-5, "NeMo reduces in float32")

    return statistic


def globally_whitened(c):
    return rounded(
        Within(
            torch.cat(on_ranks(2, lambda rank, reduce: masked_whiten(*shards(c)[rank], reduce=reduce))),
            c.mask,
        )
    )


TARGETS = {
    "*.masked_mean": lambda c: rounded(masked_mean(c.x, c.mask)),
    "trl.masked_var": lambda c: rounded(masked_mean_var(c.x, c.mask)[1]),
    "trl.masked_var.biased": lambda c: rounded(masked_mean_var(c.x, c.mask, unbiased=False)[1]),
    "*.masked_whiten": whitened(),
    "*.masked_whiten.keep_mean": whitened(shift_mean=False),
    # torchtune's flag has the opposite meaning
    "torchtune.whiten.shift_mean_true": whitened(shift_mean=False),
    "torchtune.whiten.shift_mean_false": whitened(shift_mean=True),
    "openrlhf.masked_mean.dim1": lambda c: masked_mean(c.x, c.mask, dim=1),
    "openrlhf.masked_normalize.dim1": row_by_row,
    "openrlhf.normalize_advantages": lambda c: rounded(Within(normalize_advantages(c.x, c.mask), c.mask)),
    "nemo_aligner.masked_global_mean_var.mean": global_statistic(0),
    "nemo_aligner.masked_global_mean_var.var": global_statistic(1),
    "trlx.get_global_statistics.mean": global_statistic(0, all_places=True),  # trlx includes the padding
    "trlx.get_global_statistics.var": global_statistic(1, all_places=True),
    "local_then_concat.trl.masked_whiten": lambda c: rounded(
        Within(torch.cat([masked_whiten(x, m) for x, m in shards(c)]), c.mask)
    ),
    "global.trl.masked_whiten": globally_whitened,
}


@pytest.mark.parametrize(("case", "key"), outputs("whiten.json"))
def test_golden(case, key):
    check(case, key, TARGETS)


def test_every_table_entry_is_used():
    assert_no_stale_entries("whiten.json", TARGETS)


NAN, INF = float("nan"), float("inf")
X = torch.tensor([[1.0, 3.0, NAN], [5.0, INF, -INF]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    "mask", [MASK, MASK.bool(), MASK.float(), MASK.double()], ids=["int", "bool", "float32", "float64"]
)
def test_worked_by_hand_with_rubbish_outside(mask):
    assert masked_sum(X, mask).item() == 9.0
    assert masked_sum(X, mask, dim=1).tolist() == [4.0, 5.0]
    assert masked_mean(X, mask).item() == 3.0
    assert masked_mean(X, mask, dim=1).tolist() == [2.0, 5.0]
    assert masked_mean(X, mask, eps=1.0).item() == 9 / 4
    mean, var, count = masked_mean_var(X, mask)
    assert (mean.item(), var.item(), count.item()) == (3.0, 4.0, 3.0)  # deviations -2, 0, 2: 8 / 2
    assert masked_mean_var(X, mask, unbiased=False)[1].item() == pytest.approx(8 / 3, rel=1e-15)
    torch.testing.assert_close(
        masked_whiten(X, mask, eps=0.0), torch.tensor([[-1.0, 0, 0], [1, 0, 0]], dtype=torch.float64)
    )
    torch.testing.assert_close(
        masked_whiten(X, mask, eps=0.0, min_var=16.0),
        torch.tensor([[-0.5, 0, 0], [0.5, 0, 0]], dtype=torch.float64),
    )
    torch.testing.assert_close(
        masked_whiten(X, mask, False, eps=0.0), torch.tensor([[2.0, 3, 0], [4, 0, 0]], dtype=torch.float64)
    )


def test_an_empty_mask_and_a_single_position():
    nothing = torch.zeros_like(MASK)
    assert masked_mean(X, nothing).item() == 0.0
    assert masked_mean(X, nothing, dim=1).tolist() == [0.0, 0.0]
    assert [s.item() for s in masked_mean_var(X, nothing)] == [0.0, 0.0, 0.0]
    assert masked_whiten(X, nothing).tolist() == [[0.0] * 3] * 2
    one = torch.tensor([[0, 1, 0], [0, 0, 0]])
    assert [s.item() for s in masked_mean_var(X, one)] == [3.0, 0.0, 1.0]
    assert masked_whiten(X, one).tolist() == [[0.0] * 3] * 2  # whitening one value gives x - mean = 0
    assert masked_whiten(X, one, shift_mean=False).tolist() == [[0.0, 3.0, 0.0], [0.0] * 3]


def test_two_passes_keep_the_digits_of_values_far_from_zero():
    x = torch.tensor([[1e6 + 1, 1e6 + 2, 1e6 + 3]])  # E[x^2] - E[x]^2 in float32 is off by tens of thousands
    assert masked_mean_var(x, torch.ones(1, 3))[1].item() == pytest.approx(1.0, rel=1e-6)
