"""Tests data.difficulty: when prompts are due, how often they are drawn, its state, and its time."""

import time
from copy import deepcopy

import pytest
import torch

from ppo_ds.data.difficulty import Difficulty
from ppo_ds.data.prompts import PromptStream
from ppo_ds.errors import UserError
from tests.ppo.conftest import run_ranks


def made(prompts, floor=0.25, responses=2, seed=0, gather=lambda scores: scores):
    return Difficulty(prompts, floor=floor, responses=responses, seed=seed, gather=gather)


def at(difficulty, due):
    """Makes the prompts due at given times, in the format of a checkpoint."""
    columns = {
        "due": torch.tensor(due, dtype=torch.float64),
        "last": torch.zeros(len(due)),
        "equal": torch.zeros(len(due), dtype=torch.int32),
    }
    difficulty.load_state_dict({"observed": 0, **columns})


def due_times(difficulty):
    return difficulty._columns["due"].tolist()


def test_due_times_by_hand(monkeypatch):
    """Computes the due times of four prompts by hand, with the floor 1/4 and two responses to a prompt.

    The random numbers are 0.5 for the first and 0.25 for the second prompt of a draw: a settled prompt skips
    2 x 3 x 0.5 = 3 or 2 x 3 x 0.25 = 1.5 passes, and is due in the middle or after a quarter of a pass.
    """
    difficulty = made(4)
    monkeypatch.setattr(
        difficulty,
        "_uniform",
        lambda count: torch.tensor([0.5, 0.25, 0.5, 0.25], dtype=torch.float64)[:count],
    )
    at(difficulty, [0.1, 0.9, 0.3, 0.6])
    assert difficulty.draw(2) == [0, 2] == difficulty.draw(2)
    difficulty.observe(torch.tensor([1.0, 1.0, 0.0, 1.0]))  # 0 is settled: four passes later; 2 is not: one
    assert due_times(difficulty) == [4.5, 0.9, 1.25, 0.6]
    assert difficulty.draw(2) == [3, 1]
    assert difficulty.metrics == {"rollout/settled_frac": 0.25, "rollout/settled_drawn_frac": 0.0}
    difficulty.observe(torch.tensor([0.0, 0.0, 1.0, 1.0]))  # 0.6 + 1 + 3 = 4.6 and 0.9 + 1 + 1.5 = 3.4
    assert due_times(difficulty) == [4.5, 3.25, 1.25, 4.5]
    at(difficulty, [2.5, 7.0, 7.0, 7.0])
    for score, settled in ((0.0, 0.0), (1.0, 0.0), (1.0, 0.25), (0.0, 0.0)):  # one response at a time
        assert difficulty.draw(1) == [0]
        difficulty.observe(torch.tensor([score]))
        assert difficulty.settled.double().mean() == settled
        at_end = due_times(difficulty)[0]
        difficulty._columns["due"][0] = 2.5
    assert at_end == 3.25  # due in the next pass again, since the last two scores differ


def drawn_by(difficulty, scores_of, steps, batch):
    """Draws ``steps`` batches; ``scores_of`` returns the scores of the prompts of a step."""
    drawn = []
    for step in range(steps):
        drawn.append(difficulty.draw(batch))
        difficulty.observe(scores_of(torch.tensor(drawn[-1]), step).float())
    return torch.tensor(drawn)


def test_without_settled_prompts_every_pass_has_every_prompt_once():
    passes = drawn_by(made(30), lambda prompts, step: prompts * 0 + step, 18, 10).view(6, 30)
    assert passes.sort(1).values.eq(torch.arange(30)).all() and len(passes.unique(dim=0)) == 6
    assert not torch.equal(passes, drawn_by(made(30, seed=1), lambda p, s: p * 0 + s, 18, 10).view(6, 30))


@pytest.mark.parametrize("floor", [1.0, 0.3, 0.05])
def test_settled_prompts_are_drawn_with_the_weight_of_the_floor(floor):
    """Compares the counts of 300 settled and 100 other prompts with f s / (f s + 1 - s)."""
    difficulty = made(400, floor)
    drawn = drawn_by(difficulty, lambda prompts, step: (prompts >= 300) * step, 1600, 20)[400:]
    counts = torch.bincount(drawn.flatten(), minlength=400).double()
    share = float(counts[:300].sum() / counts.sum())
    assert share == pytest.approx(floor * 300 / (floor * 300 + 100), rel=0.02)
    assert counts[300:].max() - counts[300:].min() <= 2  # the others are drawn equally often
    # a binomial would have a larger spread than draws that are spread over the passes
    assert counts[:300].var() < counts[:300].mean() + 1 and counts.min() > 0


def test_a_run_continues_exactly_and_does_not_depend_on_the_ranks(source):
    prompts = source(*(f"prompt {i}" for i in range(40)))

    def stream(world, state):
        difficulty = made(40, floor=0.1, responses=4, gather=world.concat)
        made_stream = PromptStream(
            prompts,
            prompts_per_step=8, samples_per_prompt=2, rank=world.rank, world_size=world.size,
            difficulty=difficulty,
        )  # fmt: skip
        if state is not None:
            made_stream.load_state_dict(state[0])
            difficulty.load_state_dict(deepcopy(state[1]))
        return made_stream, difficulty

    def steps(world, first, last, state=None):
        draws, difficulty = stream(world, state)
        seen = []
        for step in range(first, last):
            numbers = torch.tensor([row["n"] for row in next(draws).metadata])
            difficulty.observe((numbers > 30) * (step % 3.0))
            seen.append(world.concat(numbers).tolist())
        return seen, deepcopy([draws.state_dict(), difficulty.state_dict()])

    ((whole, end),) = run_ranks(1, lambda world: steps(world, 0, 20))
    for ranks, later in ((2, 1), (1, 2), (4, 2)):
        begun = run_ranks(ranks, lambda world: steps(world, 0, 9))
        assert all(same(state, begun[0][1]) for _, state in begun)
        assert all(seen == whole[:9] for seen, _ in begun)
        for seen, state in run_ranks(later, lambda world, state=begun[0][1]: steps(world, 9, 20, state)):
            assert seen == whole[9:] and same(state, end)


def same(one, other):
    pairs = zip(one[1].items(), other[1].items(), strict=True)
    equal = [a == b and torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for (a, x), (b, y) in pairs]
    return one[0] == other[0] and all(equal)


def test_a_checkpoint_of_other_data_is_refused():
    with pytest.raises(UserError, match="data.difficulty: the checkpoint remembers 3 prompts, but the data"):
        made(4).load_state_dict(made(3).state_dict())


def test_a_step_over_many_prompts_takes_milliseconds():
    """Bounds the time of a step, including the copy of the state before it, with a floor near 0."""
    difficulty = made(200_000, floor=1e-12, responses=8)
    begin = time.monotonic()
    for _ in range(10):
        difficulty.state_dict()
        difficulty.draw(512)
        difficulty.observe(torch.zeros(512 * 8))
    assert time.monotonic() - begin < 2
