"""Tests scores that are computed while the models work: their overlap, waiting, stops, and step rewards."""

from concurrent.futures import Future
from threading import Event

import pytest
import torch

from ppo_ds.background.pending import Pending, all_of
from ppo_ds.distributed import heartbeat
from ppo_ds.ppo.collector import scored, wait_for_scores
from ppo_ds.ppo.experience import ExperienceMaker, mask_stops
from ppo_ds.rewards.base import start_scoring
from ppo_ds.rewards.function import FunctionReward
from ppo_ds.types import Rollout, Scores
from tests.ppo.algo_cases import Stub, maker, rounded, shaper
from tests.ppo.test_collector import PER_ROUND, SAMPLES, dynamic

EOS = 2


class Words:
    """Stands in for a tokenizer whose token 7 is a blank line, 2 is the end token, and others are letters."""

    def decode(self, ids):
        return "".join({7: "\n\n", EOS: ""}.get(i, chr(ord("a") + i)) for i in ids)


def rollout_of(*responses):
    """Makes a rollout of finished responses to prompts of one token."""
    width = max(map(len, responses))
    ids = torch.tensor([[8, *ids, *[9] * (width - len(ids))] for ids in responses])
    mask = torch.arange(width) < torch.tensor([len(ids) for ids in responses])[:, None]
    attention = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), mask], 1)
    rows = tuple({"prompt_text": f"p{n}"} for n in range(len(responses)))
    ended = torch.tensor([row[-1] == EOS for row in responses])
    limits = torch.full((len(ids),), width + 1)
    return Rollout(ids, attention, mask, ended, limits, torch.zeros(mask.shape), rows)


def make_with(make, rollout, pending, kl_coef=0.0):
    """Makes experience with scores that may be pending."""
    return ExperienceMaker.__call__(make, rollout, pending, kl_coef)


# -- step rewards, worked by hand ------------------------------------------------------------------------

STEPS = "def score(prompts, responses, rows): return [[0.5, -1.0, 2.0], [1.5]]"


@pytest.fixture
def by_steps(tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    return FunctionReward(f"{tmp_path}/steps.py:score", tokenizer=Words())


RESPONSES = [[3, 7, 4, 5, 7, 6, EOS], [3, EOS]]  # steps: d / ef / g, and d


def test_step_rewards_become_rewards_to_go(world, by_steps):
    """Gamma and lambda are 1, so the return of a token is the sum of the rewards from that token on.

    The critic's value of a state is the id of its next token, so advantages are returns minus ids.
    """
    rollout = rollout_of(*RESPONSES)
    make = maker(world, reference=Stub())
    experience, seen = make_with(make, rollout, by_steps.start_scoring(rollout))
    assert rounded(experience.rewards) == [[0, 0.5, 0, 0, -1, 0, 2, 0], [0, 1.5, 0, 0, 0, 0, 0, 0]]
    assert rounded(experience.returns) == [[1.5, 1.5, 1, 1, 1, 2, 2, 0], [1.5, 1.5, 0, 0, 0, 0, 0, 0]]
    assert rounded(experience.advantages) == [
        [1.5 - 3, 1.5 - 7, 1 - 4, 1 - 5, 1 - 7, 2 - 6, 2 - 2],
        [1.5 - 3, 1.5 - 2, 0, 0, 0, 0, 0],
    ]
    assert experience.scores.tolist() == [1.5, 1.5] and seen["reward/total_mean"] == 1.5


def test_the_kl_is_subtracted_from_step_rewards_and_the_clip_is_not_applied(world, by_steps):
    """log pi_ref is log pi - 0.2, so each token costs 0.1 with the coefficient 0.5."""
    rollout = rollout_of(*RESPONSES)
    make = maker(world, shaper=shaper(world, clip=0.25))
    experience, _ = make_with(make, rollout, by_steps.start_scoring(rollout), 0.5)
    assert rounded(experience.rewards)[0] == [-0.1, 0.4, -0.1, -0.1, -1.1, -0.1, 1.9, 0]


def test_the_reward_of_a_masked_end_token_moves_to_the_last_action(world, by_steps):
    rollout = rollout_of(*RESPONSES)
    scores = by_steps(rollout)
    masked = scored(mask_stops(rollout, (EOS,)), scores)
    assert masked.token_scores.tolist() == [[0, 0.5, 0, 0, -1, 2, 0], [1.5, 0, 0, 0, 0, 0, 0]]
    experience, _ = make_with(
        maker(world, reference=Stub(), masked_stop_ids=(EOS,)), rollout, Pending.of(scores)
    )
    assert rounded(experience.rewards) == [[0, 0.5, 0, 0, -1, 2, 0, 0], [1.5, 0, 0, 0, 0, 0, 0, 0]]


def test_dynamic_sampling_compares_the_sums(world):
    """The rewards of all responses have the total 0; those to prompts 1 and 6 differ in a token score."""

    def reward(rollout):
        tokens = torch.zeros(rollout.response_mask.shape)
        for i, row in enumerate(rollout.metadata):
            tokens[i, 0] = float(i % SAMPLES and row["n"] in (1, 6))
        return Scores(torch.zeros(len(rollout)), tokens, {"tokens": tokens.sum(1)})

    numbers, rollout, seen, _ = dynamic(world, (), max_rounds=2, reward=reward)
    assert numbers == [n for n in (1, 6, 0, 2) for _ in range(SAMPLES)]
    assert seen["rollout/useful_group_frac"] == 2 / (2 * PER_ROUND)
    assert rollout.token_scores.sum() == 2 and rollout.components[1] == {"tokens": 1.0}


# -- overlap ---------------------------------------------------------------------------------------------

WAITS = """
import pathlib, time
{kind}def score(prompts, responses, rows):
    while not pathlib.Path(__file__).with_name("forward").exists():
        {pause}
    return [3.0] * len(rows)
"""
ASLEEP, IN_LOOP = "time.sleep(0.01)", "import asyncio; await asyncio.sleep(0.01)"
OVERLAPPING = {
    "processes": ("", ASLEEP, {"pool": "process", "workers": 2}),
    "one coroutine": ("async ", IN_LOOP, {}),
}


class Signalling(Stub):
    """A model that reports each forward."""

    def __init__(self, report):
        super().__init__(shift=2.0)
        self.report = report

    def __call__(self, *inputs):
        self.report()
        return super().__call__(*inputs)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_function_overlaps_with_the_forwards(world, tmp_path, name):
    """The function returns only after a forward of the reference, which runs after scoring has started."""
    kind, pause, settings = OVERLAPPING[name]
    (tmp_path / "waits.py").write_text(WAITS.format(kind=kind, pause=pause))
    reward = FunctionReward(f"{tmp_path}/waits.py:score", tokenizer=Words(), **settings)
    rollout, actor = rollout_of([3, EOS], [4, 5, EOS]), Stub()
    pending = start_scoring(reward, rollout)
    make = maker(world, actor=actor, reference=Signalling((tmp_path / "forward").touch))
    experience, _ = make_with(make, rollout, pending)
    assert experience.scores.tolist() == [3, 3] and actor.forwards == 1


# -- waiting ---------------------------------------------------------------------------------------------


def scores_of_tasks(tasks, cancel=lambda: None):
    """Makes pending scores whose rows are the results of the tasks."""
    return Pending(
        lambda: Scores(torch.tensor([task.result() for task in tasks]), torch.zeros(len(tasks), 1), {}),
        tuple(tasks),
        cancel,
    )


def test_all_ranks_wait_together_with_signs_of_life(on_ranks):
    """Rank 0 has its scores at once; each of rank 1's tasks is completed only once both ranks wait."""
    tasks, checks = [Future() for _ in range(3)], [0, 0]
    beats = heartbeat.read().beats

    def work(world):
        def check():
            checks[world.rank] += 1
            open_tasks = [task for task in tasks if not task.done()]
            if world.rank == 1 and open_tasks:
                open_tasks[0].set_result(2.5)

        ready = Future()
        ready.set_result(1.0)
        pending = scores_of_tasks([ready] if world.rank == 0 else tasks)
        return wait_for_scores(pending, world, check).total.tolist()

    assert on_ranks(2, work) == [[1.0], [2.5] * 3]
    assert checks[0] == checks[1] >= 4 and heartbeat.read().beats >= beats + 4


def test_the_first_error_cancels_the_other_calls(world):
    failing, waiting, cancelled = Future(), Future(), Event()
    failing.set_exception(ZeroDivisionError("by the user"))
    pending = all_of([scores_of_tasks([waiting], cancelled.set), scores_of_tasks([failing])])
    with pytest.raises(ZeroDivisionError):
        wait_for_scores(pending, world, lambda: None)
    assert cancelled.is_set()


def test_known_scores_need_no_collective():
    scores = Scores(torch.ones(2), torch.zeros(2, 1), {})
    assert wait_for_scores(Pending.of(scores), None, None) is scores
