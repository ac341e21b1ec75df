"""make_experience on stubs: token rewards, advantages and the numbers seen on the way, worked by hand."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from ppo_ds.algo.experience import AdvantageShape, ExperienceMaker, RewardShape
from ppo_ds.types import Rollout, Scores

NAN = float("nan")
PLAIN = RewardShape(kl_in_reward=True, kl_estimator="k1", clip=None, missing_eos=None, missing_eos_value=1.0)
TO_GO = AdvantageShape(gamma=1.0, lam=1.0, lam_critic=None, whiten="none")  # returns are rewards-to-go


class Stub:
    """Answers with -(token + shift) / 10 for each response token, NaN where nothing is attended; values: the tokens themselves."""

    def __init__(self, shift=0.0, value=False):
        self.shift, self.value = shift, value
        self.is_resident = False
        self.forwards = 0

    def __call__(self, ids, attention_mask, response_width):
        assert not torch.is_grad_enabled()
        self.forwards += 1
        answers = ids[:, -response_width:].double()
        out = (answers if self.value else -(answers + self.shift) / 10).masked_fill(~attention_mask[:, -response_width:], NAN)
        return out if self.value else (out, None)

    @contextmanager
    def resident(self):
        self.is_resident = True
        yield
        self.is_resident = False


def timer(phase):
    return nullcontext()


def reward_of(*scores, per_token=0.0, **components):
    def reward(rollout):
        n = len(rollout)
        return Scores(
            torch.tensor(scores),
            torch.full(rollout.response_mask.shape, per_token).masked_fill(~rollout.response_mask, 0.0),
            {name: torch.tensor(column) for name, column in components.items()} if len(scores) == n else {},
        )

    return reward


@pytest.fixture
def rollout():
    """Answers [1 2] and [3 4 5] (the second cut at the limit) to prompts of 2 and 1 tokens; the padding holds token 9."""
    ids = torch.tensor([[8, 8, 1, 2, 9], [9, 8, 3, 4, 5]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    logprobs = torch.tensor([[-0.1, -0.2, 0.0], [-0.3, -0.4, -0.8]])
    return Rollout(ids, mask, mask[:, 2:], torch.tensor([True, False]), logprobs, ({}, {}))


def maker(world, reward=None, reference=None, **changes):
    parts = dict(
        actor=Stub(),
        reference=reference or Stub(shift=2.0),
        critic=Stub(value=True),
        reward=reward or reward_of(1.0, -2.0),
        world=world,
        token_budget=1000,
        reward_shape=PLAIN,
        advantage_shape=TO_GO,
        timer=timer,
    )
    return ExperienceMaker(**parts | changes)


def rounded(x):
    return [[round(v, 4) for v in row] for row in x.tolist()]


def test_by_hand(world, rollout):
    """log pi = -token/10, log pi_ref = that - 0.2, so k1 = 0.2 on each token and its charge at 0.5 is 0.1."""
    experience, seen = maker(world)(rollout, 0.5)
    assert rounded(experience.logprobs) == [[-0.1, -0.2, 0], [-0.3, -0.4, -0.5]]
    assert rounded(experience.ref_logprobs) == [[-0.3, -0.4, 0], [-0.5, -0.6, -0.7]]
    assert rounded(experience.values) == [[1, 2, 0], [3, 4, 5]]
    assert rounded(experience.rewards) == [[-0.1, 0.9, 0], [-0.1, -0.1, -2.1]]
    assert rounded(experience.returns) == [[0.8, 0.9, 0], [-2.3, -2.2, -2.1]]
    assert rounded(experience.advantages) == [[-0.2, -1.1, 0], [-5.3, -6.2, -7.1]]
    assert experience.scores.tolist() == [1.0, -2.0] and experience.finished.tolist() == [True, False]
    assert torch.equal(experience.ids, rollout.ids) and torch.equal(experience.response_mask, rollout.response_mask)
    assert seen["adv/mean"] == pytest.approx(-19.9 / 5) and seen["adv/max_abs"] == pytest.approx(7.1)
    assert seen["adv/std"] == pytest.approx(2.7924, abs=1e-4)  # of -0.2 -1.1 -5.3 -6.2 -7.1, population
    assert seen["parity/logp_abs_diff_mean"] == pytest.approx(0.3 / 5, abs=1e-6)
    assert seen["parity/logp_abs_diff_max"] == pytest.approx(0.3, abs=1e-6)
    assert seen["reward/clipped_frac"] == 0.0 and seen["reward/kl_penalty_mean"] == pytest.approx(-(0.2 + 0.3) / 2)


def test_discounted_gae(world, rollout):
    """gamma 0.5, lambda 0.5, first row: delta_2 = 0.9 - 2, delta_1 = -0.1 + 0.5 * 2 - 1, A_1 = delta_1 + 0.25 * A_2."""
    experience, _ = maker(world, advantage_shape=AdvantageShape(0.5, 0.5, None, "none"))(rollout, 0.5)
    assert rounded(experience.advantages)[0] == [-0.375, -1.1, 0]
    assert rounded(experience.returns)[0] == [0.625, 0.9, 0]
    apart, _ = maker(world, advantage_shape=AdvantageShape(0.5, 0.5, 1.0, "none"))(rollout, 0.5)
    assert rounded(apart.advantages)[0] == [-0.375, -1.1, 0] and rounded(apart.returns)[0] == [0.35, 0.9, 0]  # -0.1 + 0.5 * 0.9


def test_no_kl_where_the_actor_is_the_reference(world, rollout):
    experience, _ = maker(world, reference=Stub())(rollout, 0.5)
    assert torch.equal(experience.logprobs, experience.ref_logprobs)
    assert rounded(experience.rewards) == [[0, 1, 0], [0, 0, -2]]


def test_no_charge_where_the_kl_is_not_in_the_reward(world, rollout):
    shape = RewardShape(kl_in_reward=False, kl_estimator="k1", clip=None, missing_eos=None, missing_eos_value=1.0)
    experience, seen = maker(world, reward_shape=shape)(rollout, 0.5)
    assert rounded(experience.rewards) == [[0, 1, 0], [0, 0, -2]] and seen["reward/kl_penalty_mean"] == 0


def test_the_chosen_estimator_is_charged(world, rollout):
    shape = RewardShape(kl_in_reward=True, kl_estimator="k2", clip=None, missing_eos=None, missing_eos_value=1.0)
    experience, seen = maker(world, reward_shape=shape)(rollout, 0.5)
    assert rounded(experience.rewards) == [[-0.01, 0.99, 0], [-0.01, -0.01, -2.01]]
    assert seen["reward/kl_penalty_mean"] == pytest.approx(-(0.02 + 0.03) / 2)


@pytest.mark.parametrize(
    ("mode", "clip", "shaped", "clipped"),
    [
        ("subtract", None, [1, -2.7], 0.0),
        ("set", None, [1, 0.7], 0.0),
        ("scale", None, [1, -1.4], 0.0),
        (None, 1.5, [1, -1.5], 0.5),
        (None, 0.5, [0.5, -0.5], 1.0),
        ("subtract", 2.0, [1, -2], 0.5),  # the penalty comes first
        ("set", 1.5, [1, 0.7], 0.0),
    ],
)
def test_missing_stop_and_clip(world, rollout, mode, clip, shaped, clipped):
    shape = RewardShape(kl_in_reward=False, kl_estimator="k1", clip=clip, missing_eos=mode, missing_eos_value=0.7)
    experience, seen = maker(world, reward_shape=shape)(rollout, 0.5)
    assert rounded(experience.rewards) == [[0, shaped[0], 0], [0, 0, shaped[1]]]
    assert seen["reward/clipped_frac"] == clipped
    assert experience.scores.tolist() == [1.0, -2.0]  # as the reward gave them


def test_token_scores_and_components(world, rollout):
    reward = reward_of(1.0, -2.0, per_token=0.25, style=[1.0, 2.0], truth=[0.0, 1.0])
    experience, seen = maker(world, reward=reward, reference=Stub())(rollout, 0.5)
    assert rounded(experience.rewards) == [[0.25, 1.25, 0], [0.25, 0.25, -1.75]]
    assert (seen["reward/component/style_mean"], seen["reward/component/truth_mean"]) == (1.5, 0.5)


def test_whitened_over_all_tokens(world, rollout):
    experience, seen = maker(world, advantage_shape=AdvantageShape(1.0, 1.0, None, "batch"))(rollout, 0.5)
    raw = torch.tensor([-0.2, -1.1, -5.3, -6.2, -7.1])
    expected = (raw - raw.mean()) / raw.std(unbiased=False)
    torch.testing.assert_close(experience.advantages[experience.response_mask], expected, rtol=1e-4, atol=1e-5)
    assert rounded(experience.returns) == [[0.8, 0.9, 0], [-2.3, -2.2, -2.1]]  # not whitened
    assert seen["adv/max_abs"] == pytest.approx(7.1)  # before


def test_padding_holds_zeros_whatever_the_models_say(world, rollout):
    experience, _ = maker(world)(rollout, 0.5)
    for name in ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
        assert getattr(experience, name)[~rollout.response_mask].tolist() == [0.0], name


def test_the_reference_is_resident_while_it_scores_and_not_after(world, rollout):
    class Moving(Stub):
        def __call__(self, *args):
            seen.append(self.is_resident)
            return super().__call__(*args)

    seen, reference = [], Moving()
    maker(world, reference=reference, token_budget=1)(rollout, 0.5)
    assert seen == [True, True] and not reference.is_resident


@pytest.mark.parametrize("whiten", ["none", "batch"])
def test_ranks_and_budgets_change_nothing(on_ranks, world, whiten):
    """Four rows on one rank, or two on each of two with other widths: the same experience, and the same numbers, everywhere."""
    lengths = [(2, 3), (1, 1), (4, 2), (3, 5)]
    g = torch.Generator().manual_seed(0)

    def rows(which):
        p, r = max(lengths[i][0] for i in which), max(lengths[i][1] for i in which)
        ids, mask = torch.full((len(which), p + r), 9), torch.zeros(len(which), p + r, dtype=torch.bool)
        for k, i in enumerate(which):
            a, b = lengths[i]
            ids[k, p - a : p + b], mask[k, p - a : p + b] = tokens[i], True
        return Rollout(ids, mask, mask[:, p:], torch.tensor([i != 2 for i in which]), torch.zeros(len(which), r), tuple({} for _ in which))

    tokens = [torch.randint(0, 9, (a + b,), generator=g) for a, b in lengths]
    scores = [0.5, -1.0, 2.0, 3.5]
    shape = AdvantageShape(0.9, 0.8, None, whiten)

    def make(world, which, budget):
        reward = reward_of(*[scores[i] for i in which], style=[scores[i] for i in which])
        return maker(world, reward=reward, advantage_shape=shape, token_budget=budget)(rows(which), 0.3)

    whole, seen = make(world, [0, 1, 2, 3], 1000)
    for budget in (1, 12, 1000):
        for experience, numbers in on_ranks(2, lambda world, budget=budget: make(world, [2 * world.rank, 2 * world.rank + 1], budget)):
            for name in ("ids", "attention_mask", "response_mask", "finished", "scores"):
                under = experience.attention_mask if name == "ids" else torch.ones_like(getattr(experience, name), dtype=torch.bool)
                assert torch.equal(getattr(experience, name)[under], getattr(whole, name)[under]), name
            for name in ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
                torch.testing.assert_close(getattr(experience, name), getattr(whole, name), rtol=1e-5, atol=1e-5)
            assert numbers == pytest.approx(seen, abs=1e-5)
