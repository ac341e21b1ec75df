"""Tests the switches of make_experience.

The switches are masked end tokens, a lagging old policy, critics of all kinds, importance weights, and the KL
after an update.
"""

import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.algorithm.credit.keys import ADVANTAGE_ESTIMATORS
from ppo_ds.algorithm.credit.positions import ScorePosition
from ppo_ds.algorithm.rollout_is.keys import RolloutISConfig
from ppo_ds.background.pending import Pending
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ppo.collector import scores_of
from ppo_ds.ppo.experience import ExperienceMaker, mask_stops
from tests.ppo.algo_cases import (
    AS_IT_IS,
    Stub,
    answers,
    critic_free,
    critic_free_maker,
    gae,
    maker,
    rounded,
    shaper,
)

WITHOUT_CRITIC = [
    name for name, kind in ADVANTAGE_ESTIMATORS.items() if not (kind.needs_critic or kind.needs_greedy)
]

# -- end tokens that are no actions: tokens 1 and 3 end a response -------------------------------------------


def ended():
    """Makes one response for each kind of end.

    The responses end with token 1, with token 3, with a stop string (so token 6 remains an action) and at
    the limit (an inner token 1 does not end the response); the last response is only an end token.
    """
    tokens = [[5, 1], [5, 6, 3], [5, 6], [1, 5, 3], [1]]
    return answers(
        [2, 3, 2, 3, 1], finished=[True, True, True, False, True], limits=[4, 4, 4, 3, 4], tokens=tokens
    )


@pytest.mark.parametrize(
    ("masked", "actions"),
    [
        ((1, 3), [[1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0]]),
        ((1,), [[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]]),
        ((3,), [[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]),
    ],
)
def test_a_masked_end_token_is_no_action_but_attended_to(masked, actions):
    rollout = ended()
    kept = mask_stops(rollout, masked)
    assert kept.response_mask.int().tolist() == actions
    assert torch.equal(kept.attention_mask, rollout.attention_mask) and kept.response_lengths.tolist() == [
        2,
        3,
        2,
        3,
        1,
    ]
    assert kept.scores.tolist() == rollout.scores.tolist()


def test_the_score_of_a_response_whose_end_is_masked(world):
    """ "last" is the last remaining action; "next" is the position of the masked end token, which is a state.

    A response without actions has no last action, so "last" gives it no score.
    """
    rollout = replace(ended(), scores=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    common = dict(masked_stop_ids=(1, 3), charged_kl=None)
    last, _ = maker(world, **common)(rollout, 0.5)
    assert rounded(last.rewards) == [[1, 0, 0, 0], [0, 2, 0, 0], [0, 3, 0, 0], [0, 0, 4, 0], [0, 0, 0, 0]]
    place = ScorePosition("next_token", "untrained")
    following, _ = maker(world, **common, score_position=place, estimate_advantages=gae(place=place))(
        rollout, 0.5
    )
    assert rounded(following.rewards) == [
        [0, 1, 0, 0],
        [0, 0, 2, 0],
        [0, 0, 3, 0],
        [0, 0, 4, 0],
        [5, 0, 0, 0],
    ]
    assert following.value_mask.int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 0, 0, 0],
    ]
    # rewards-to-go minus V, which is the id of the next token; 0 outside the actions
    assert rounded(following.advantages) == [
        [1 - 5, 0, 0],
        [2 - 5, 2 - 6, 0],
        [3 - 5, 3 - 6, 0],
        [4 - 1, 4 - 5, 4 - 3],
        [0, 0, 0],
    ]
    assert rounded(following.returns)[0][:2] == [1, 1] and rounded(following.returns)[4][0] == 5


# -- the old policy ------------------------------------------------------------------------------------------


def test_a_lagging_old_policy_changes_only_the_ratio(world):
    """While the lagging weights are swapped in, the actor returns log pi - 0.5.

    KL, rewards and the difference to the decode log-probs still use the policy that generated.
    """
    actor, inside = Stub(), []

    @contextmanager
    def lagged():
        inside.append(actor.forwards)
        actor.shift = 5.0
        yield
        actor.shift = 0.0

    rollout = answers([2, 1], [1.0, 2.0], tokens=[[1, 2], [3]])
    plain, numbers = maker(world)(rollout, 0.5)
    made, seen = maker(world, actor=actor, lagged=SimpleNamespace(swapped=lagged))(rollout, 0.5)
    assert rounded(made.old_logprobs) == [[-0.6, -0.7], [-0.8, 0]] and rounded(made.logprobs) == [
        [-0.1, -0.2],
        [-0.3, 0],
    ]
    assert inside == [1] and actor.forwards == 2
    for name in ("logprobs", "ref_logprobs", "rewards", "values", "advantages", "returns"):
        assert torch.equal(getattr(made, name), getattr(plain, name)), name
    assert seen == numbers


# -- critics -------------------------------------------------------------------------------------------------


def test_a_value_head_on_the_actor(world):
    """Values from the actor's own forward give the same experience."""
    critic = Stub(value=True)

    class Shared(Stub):
        def __call__(self, *args):
            return PolicyOutput(super().__call__(*args).logprobs, None, critic(*args), None)

    rollout = answers([2, 1], [1.0, -2.0], tokens=[[1, 2], [3]])
    apart, _ = maker(world)(rollout, 0.5)
    actor = Shared()
    make = critic_free_maker(world, actor=actor, share_trunk=True, token_budget=1)
    made, _ = make(rollout, 0.5)
    # two micro-batches, each with one forward for log-probs and values
    assert rounded(made.values) == [[1, 2, 6], [3, 6, 0]] and actor.forwards == 2
    for name in ("logprobs", "values", "returns", "advantages"):
        assert torch.equal(getattr(made, name), getattr(apart, name)), name


@pytest.mark.parametrize("whiten", ["none", "batch", "group", "minibatch"])
@pytest.mark.parametrize("kind", ["gae", *WITHOUT_CRITIC])
def test_two_ranks_make_the_same_experience_as_one(on_ranks, world, kind, whiten):
    """One rank has two groups of two responses; two ranks have one group each, padded to its own width."""
    lengths, scores, tokens = [3, 1, 2, 4], [0.5, -1.0, 2.0, 3.5], [[1, 2, 3], [4], [5, 6], [7, 2, 1, 4]]
    parts = {"right": [0.0, 1.0, 1.0, 0.0], "form": [3.0, 1.0, 2.0, -1.0]}

    def make(world, which, budget):
        rollout = answers(
            [lengths[i] for i in which],
            [scores[i] for i in which],
            tokens=[tokens[i] for i in which],
            limits=[5] * len(which),
            **{name: [column[i] for i in which] for name, column in parts.items()},
        )
        algorithm = dict(whitening=replace(AS_IT_IS, over=whiten), group_size=2, token_budget=budget)
        if kind == "gae":
            return maker(world, estimate_advantages=gae(gamma=0.9, lam=0.8), **algorithm)(rollout, 0.3)
        estimate = critic_free(kind, 0.9, 2, reduce=world.sum)
        return critic_free_maker(world, estimate_advantages=estimate, **algorithm)(rollout, 0.3)

    whole, numbers = make(world, [0, 1, 2, 3], 1000)
    for made, seen in on_ranks(2, lambda world: make(world, [2 * world.rank, 2 * world.rank + 1], 1)):
        torch.testing.assert_close(made.advantages, whole.advantages, rtol=1e-5, atol=1e-6)
        for name in ("scores", "finished", "logprobs", "ref_logprobs", "rewards"):
            torch.testing.assert_close(getattr(made, name), getattr(whole, name), msg=name)
        assert seen == pytest.approx(numbers, abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_baselines(on_ranks, ranks):
    """Two prompts with two responses each; greedy responses score 1 and 5, and the second is cut: -1 of it.

    Scores are divided by the standard deviation of the four responses' scores, which are 2, 3, 4 and 8 after
    their mean of 4.25 is subtracted; the greedy scores are normalized by the same moments. The KL is 0.
    """

    def make(world):
        which = [0, 1, 2, 3][4 // ranks * world.rank :][: 4 // ranks]
        rollout = answers([[2, 1, 3, 1][i] for i in which], [[2.0, 3.0, 4.0, 8.0][i] for i in which])
        prompts = sorted({i // 2 for i in which})
        greedy = answers(
            [1 for _ in prompts],
            [[1.0, 5.0][i] for i in prompts],
            finished=[[True, False][i] for i in prompts],
        )
        scores = replace(scores_of(rollout), greedy=greedy)
        shape = shaper(world, "running", missing_eos="subtract", missing_eos_value=1.0)
        estimate = critic_free("remax")
        parts = dict(shaper=shape, estimate_advantages=estimate, group_size=2, charged_kl=None)
        make = critic_free_maker(world, **parts)
        made, seen = ExperienceMaker.__call__(make, rollout, Pending.of(scores), 0.0)
        return made, seen, shape.moments.state_dict()

    deviation = (sum((x - 4.25) ** 2 for x in (2, 3, 4, 8)) / 4) ** 0.5
    for made, seen, moments in on_ranks(ranks, make):
        expected = [(2 - 1) / deviation, (3 - 1) / deviation, 0.0, (8 - 4) / deviation]
        assert made.advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-4)
        assert seen["reward/baseline_mean"] == pytest.approx((2.5 - 4.25) / deviation, abs=1e-4)
        assert moments["count"] == 4


# -- importance weights for the decode backend ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "mean", "outside"),
    [
        (dict(kind="tis"), 4 / 3, 2 / 3),  # weights 2, 1.5 and 0.5
        (dict(kind="mask"), 0.5, 2 / 3),  # 0, 1.5 and 0
        (dict(kind="seq_mask_tis"), 0.0, 1.0),
        (dict(kind="truncate", level="sequence", high=4.0), 8.5 / 3, 1.0),  # products 4.5 and 0.25: 4, 4, 0.5
        # geometric means sqrt(4.5) = 2.12, which is kept, and 0.25
        (dict(kind="mask", level="sequence_mean", high=2.2), 2 * 4.5**0.5 / 3, 1 / 3),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_metrics_of_importance_weights(on_ranks, ranks, section, mean, outside):
    """The ratios are 3 and 1.5 in the first response, and 0.25 in the second, on one rank or on two.

    k3 is w - 1 - ln w.
    """
    gaps = torch.tensor([[3.0, 1.5], [0.25, 1.0]]).log()

    def work(world):
        rollout = answers([2, 1], tokens=[[1, 2], [3]])
        rollout = replace(rollout, logprobs=torch.tensor([[-0.1, -0.2], [-0.3, 0.0]]) - gaps)
        mine = torch.arange(2).chunk(world.size)[world.rank]
        rollout = replace(
            rollout.select(mine).trimmed(), components=tuple(rollout.components[i] for i in mine.tolist())
        )
        return maker(world, rollout_is=RolloutISConfig.read(section))(rollout, 0.5)

    k3 = sum(w - 1 - math.log(w) for w in (3.0, 1.5, 0.25)) / 3
    for made, seen in on_ranks(ranks, work):
        assert seen["parity/weight_mean"] == pytest.approx(mean, abs=1e-6)
        assert seen["parity/weight_outside_frac"] == pytest.approx(outside)
        assert seen["parity/k3_token_mean"] == pytest.approx(k3, abs=1e-6)
        assert float(made.weights[made.response_mask].mean()) == pytest.approx(mean, abs=1e-6)


# -- after the update ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kl_after_an_update(on_ranks, ranks):
    """log pi is -token / 10 and log pi_ref is 0.2 lower. The update doubles log pi: KL 0.2 - token / 10.

    The mean token is 4, so the mean KL is -0.2. Every rank scores its own rows.
    """
    lengths, tokens = [2, 1, 3, 1], [[1, 2], [3], [4, 5, 6], [7]]

    def work(world):
        share = range(4)[world.rank * 4 // world.size : (world.rank + 1) * 4 // world.size]
        make = maker(world, token_budget=8)
        experience, _ = make(answers([lengths[i] for i in share], tokens=[tokens[i] for i in share]), 0.5)
        make.forwards.actor = lambda *args: PolicyOutput(2 * Stub()(*args).logprobs, None, None, None)
        return make.measure_kl(experience)

    for seen in on_ranks(ranks, work):
        assert seen == pytest.approx({"kl/before_update": 0.2, "kl/after_update": -0.2}, abs=1e-6)


def test_the_line_of_an_optimizer_step(world, capsys):
    """Takes the models of the last test: log pi doubles in the step."""
    make = maker(world)
    rows, _ = make(answers([2, 1], tokens=[[1, 2], [6]]), 0.5)
    make.forwards.actor = lambda *args: PolicyOutput(2 * Stub()(*args).logprobs, None, None, None)
    losses = {"actor": torch.tensor(0.25), "critic": torch.tensor(1.5)}
    make.print_step(3, rows, losses)
    make.print_step(4, replace(rows, ref_logprobs=None), losses)
    make.print_step(5, replace(rows, logprobs=None), {"critic": torch.tensor(1.5)})
    assert capsys.readouterr().out.splitlines() == [
        "  optimizer step 3: actor loss 0.2500, critic loss 1.5000, KL 0.2000 -> -0.1000",
        "  optimizer step 4: actor loss 0.2500, critic loss 1.5000",
        "  optimizer step 5: critic loss 1.5000",
    ]
