"""Tests for which models make_experience keeps graphs, and what happens if memory runs out meanwhile."""

import logging
from functools import partial

import pytest
import torch

from ppo_ds.errors import RunError
from ppo_ds.ppo.kept_forwards import KeptForwards
from ppo_ds.types import Sequences
from tests.ppo.algo_cases import Stub, answers, maker
from tests.ppo.conftest import run_ranks
from tests.support.budgets import fixed_budgets

SETTING = "memory.reuse_forwards=off"


class Watched(Stub):
    """Records whether each forward has gradients; forwards with gradients may run out of memory."""

    def __init__(self, value=False, short=False):
        super().__init__(value=value)
        self.short, self.with_grad = short, []

    def __call__(self, *rows):
        self.with_grad.append(torch.is_grad_enabled())
        if self.short and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        with torch.no_grad():
            return super().__call__(*rows)


def keeping(world, actor, critic=None, roles=("actor", "critic"), **parts):
    """Returns a maker that keeps the graphs of ``roles``, and its KeptForwards."""
    options = {name: {} for name in roles}
    kept = KeptForwards(options=options, token_budget=1000, packed=False, trained=2, world=world)
    return maker(world, actor=actor, critic=critic or Watched(value=True), kept=kept, **parts), kept


@pytest.mark.parametrize("roles", [("actor",), ("actor", "critic")])
def test_the_actors_forward_has_no_gradients_if_only_the_critic_is_trained(world, roles):
    actor, critic = Watched(), Watched(value=True)
    make, kept = keeping(world, actor, critic, roles)
    rollout, both = answers([2, 1], [0.5, 0.25]), "critic" in roles
    make(rollout, 0.5, critic_only=True)
    assert (actor.with_grad, critic.with_grad) == ([False], [both])
    assert set(kept.take().by_model) == set(roles) - {"actor"}
    make(rollout, 0.5)
    assert (actor.with_grad, critic.with_grad) == ([False, True], [both, both])
    assert set(kept.take().by_model) == set(roles)


def test_without_memory_for_a_graph_all_ranks_repeat_the_forwards_without_graphs(caplog):
    """The budget stays, and later rollouts keep no graph either."""

    def work(world):
        budgets, actor = fixed_budgets(world, score_tokens=100), Watched(short=world.rank == 1)
        guard = partial(budgets.guard, budgets.score, what="log-probs and values", repeatable=True)
        make, kept = keeping(world, actor)
        make.forwards.guard = partial(guard, economize=kept.switch_off)
        plain = maker(world)
        for lengths in ([2, 1], [1, 2]):
            rollout = answers(lengths, [0.5, 0.25])
            made, expected = make(rollout, 0.5)[0], plain(rollout, 0.5)[0]
            assert torch.equal(made.logprobs, expected.logprobs) and torch.equal(made.values, expected.values)
            assert kept.take().rows is None
        return actor.with_grad, budgets.score.tokens, budgets.score.halved_from

    with caplog.at_level(logging.WARNING):
        assert run_ranks(2, work) == [([True, False, False], 100, None)] * 2
    (line,) = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert line.startswith(f"warning: out of memory in log-probs and values: it is repeated with {SETTING}")


@pytest.mark.parametrize("budget", [100, 1])
def test_a_phase_that_cannot_be_repeated_names_the_setting(world, budget):
    """With ZeRO-3 the other ranks wait in a collective; a budget of one token cannot be halved."""
    budgets = fixed_budgets(world, score_tokens=budget)
    make, kept = keeping(world, Watched(short=True))
    make.forwards.guard = partial(
        budgets.guard, budgets.score, what="log-probs", repeatable=False, economize=kept.switch_off
    )
    advice = f"resumes with memory.score_tokens=50, and {SETTING} needs less memory"
    if budget == 1:
        advice = f"set a lower memory.score_tokens, or use {SETTING}, or reference.zero"
    with pytest.raises(RunError, match=advice):
        make(answers([2, 1], [0.5, 0.25]), 0.5)


@pytest.mark.parametrize(
    ("tokens", "names", "fits"),
    [
        # one graph of two: 5 x 12 x 2 = 3 x 2 x 20 forwards of a token
        ((12, 8), ("critic",), True),
        ((13, 7), ("critic",), False),
        # both graphs: 4 x 15 x 2 = 3 x 2 x 20
        ((15, 5), ("actor", "critic"), True),
        ((16, 4), ("actor", "critic"), False),
        ((2000, 2000), ("critic",), False),  # above the budget of a micro-batch
    ],
)
def test_a_graph_is_kept_where_balancing_the_tokens_saves_less(
    tokens: tuple[int, int], names: tuple[str, ...], fits: bool
) -> None:
    def work(world):
        mask = torch.ones(1, tokens[world.rank], dtype=torch.bool)
        rows = Sequences(mask.long(), mask, mask[:, 1:])
        _, kept = keeping(world, Watched())
        return kept.fits(rows, [torch.arange(1)], names)

    assert run_ranks(2, work) == [fits] * 2
