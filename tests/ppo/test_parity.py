"""Tests the parity check at start-up, which compares decoding and training on a few tokens."""

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ppo.health import disagreement, parity_gap
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import Prompts, Rollout

SAMPLING = SamplingParams(
    max_new_tokens=100, min_new_tokens=20, temperature=0.7, top_p=1.0, top_k=0,
    stop_token_ids=(1,), stop_strings=(),
)  # fmt: skip
ALLOWED = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}  # largest mean |difference| per token, in nats
LENGTHS = [1, 3, 2, 4, 4, 1, 2, 3]


def measured(world, errors=(0.0,), n=10, sampling=SAMPLING, seen=None):
    """Runs the parity check with decode log-probs that are off by ``errors``, repeated over the tokens.

    Outside the mask they are off by 1000.
    """
    generating = []

    def train(ids, mask, width):
        assert not generating
        return PolicyOutput(-ids[:, -width:].double() / 10, None, None, None)

    @contextmanager
    def generation_mode():
        generating.append(1)
        yield
        generating.pop()

    def generator(prompts, sampling):
        assert generating
        if seen is not None:
            seen.append((len(prompts), sampling))
        lengths = torch.tensor(LENGTHS)[: len(prompts)]
        mask = torch.arange(4) < lengths[:, None]
        answers = torch.arange(len(prompts) * 4).view(-1, 4) % 7
        logprobs = -answers.float() / 10
        count = int(mask.sum())
        logprobs[mask] += torch.tensor(errors).repeat(count)[:count]
        logprobs[~mask] = 1000.0
        return Rollout(
            torch.cat([prompts.ids, answers], 1), torch.cat([prompts.mask, mask], 1), mask, lengths < 4,
            prompts.limits, logprobs, prompts.metadata,
        )  # fmt: skip

    class Actor(SimpleNamespace):
        def __call__(self, *args):
            return train(*args)

    ids = torch.ones(n, 2, dtype=torch.long)
    prompts = Prompts(ids, ids.bool(), torch.full((n,), 4), tuple({} for _ in range(n)))
    actor = Actor(world=world, generation_mode=generation_mode)
    return parity_gap(prompts, actor=actor, generator=generator, sampling=sampling, token_budget=12)


def test_equal_log_probs_pass(world):
    seen = []
    mean, largest = measured(world, seen=seen)
    assert mean == pytest.approx(0, abs=1e-6) and largest == pytest.approx(0, abs=1e-6)
    ((n, sampling),) = seen
    assert n == 8 and (sampling.max_new_tokens, sampling.min_new_tokens, sampling.temperature) == (16, 0, 0.7)


@pytest.mark.parametrize("dtype", ALLOWED)
def test_differences_beyond_the_bound_of_the_dtype_fail(world, dtype):
    bound = ALLOWED[dtype]
    gap = measured(world, [0.9 * bound])
    assert gap[0] == pytest.approx(0.9 * bound, rel=1e-2) and disagreement(gap, dtype) is None
    assert re.search(
        rf"differ by {1.1 * bound:.4g} nats.*allowed for {dtype} is {bound:.4g}",
        disagreement(measured(world, [1.1 * bound]), dtype),
    )


def test_errors_of_both_signs_do_not_cancel(world):
    mean, largest = measured(world, [0.03, -0.01])
    assert mean == pytest.approx(0.02, abs=1e-3) and largest == pytest.approx(0.03, abs=1e-6)
    assert disagreement(measured(world, [0.5, -0.5]), "bf16")


def test_nan_does_not_pass(world):
    assert "nan" in disagreement(measured(world, [float("nan"), 0.0]), "bf16")


def test_all_ranks_have_the_same_result(on_ranks):
    """Only rank 1 has a difference; both ranks compare the mean over all ranks with the limit."""
    first, second = on_ranks(2, lambda world: measured(world, [0.01 * world.rank]))
    assert first == second == (pytest.approx(0.005, rel=1e-3), pytest.approx(0.01, rel=1e-3))
