"""Tests reward=teacher: rewards by hand and by transformers, micro-batches, ranks, and errors."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ppo_ds.algorithm.credit.keys import GAEConfig
from ppo_ds.algorithm.credit.positions import ScorePosition
from ppo_ds.algorithm.credit.responses import CreditOptions, Responses
from ppo_ds.algorithm.credit.returns import reinforce
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.ppo.collector import scored
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.teacher import TeacherReward
from tests.ppo.conftest import run_ranks
from tests.rewards.model_cases import TINY, save_model
from tests.rewards.reward_cases import loaded, make_rollout, save_tokenizer

LLAMA = LlamaConfig(**{name: value for name, value in TINY.items() if name != "num_labels"})
PAIRS = [("what is it", "an answer"), ("and", "no"), ("a longer question", "yes, it is"), ("x", "")]


class Resident:
    """Stands in for a FrozenModel: counts forwards, which must be inside ``resident``."""

    def __init__(self, forward):
        self.forward, self.inside, self.calls = forward, False, 0

    @contextmanager
    def resident(self):
        self.inside = True
        yield
        self.inside = False

    def __call__(self, *inputs, **options):
        assert self.inside
        self.calls += 1
        with torch.no_grad():
            return self.forward(*inputs, **options)


@pytest.fixture
def teacher(tmp_path):
    """Saves a tiny teacher and returns its folder."""
    save_model(tmp_path / "teacher", LLAMA, AutoModelForCausalLM)
    return tmp_path / "teacher"


@pytest.fixture
def made(tokenizer):
    """Builds the reward; ``forward`` replaces the teacher."""

    def make(path, forward=None, temperature=1.0, score_tokens=10_000, all_reduce_max=lambda n: n):
        def load_frozen(load, model, zero, key):
            module = loaded(load, model, key).eval()  # in one thread at a time
            make.placed = Resident(forward or module)
            return module, make.placed

        return TeacherReward(
            ModelConfig(path=str(path), dtype="fp32"),
            tokenizer=tokenizer,
            temperature=temperature,
            load_frozen=load_frozen,
            all_reduce_max=all_reduce_max,
            score_tokens=score_tokens,
        )

    return make


def with_logprobs(rollout, seed=0):
    noise = -torch.rand(rollout.response_mask.shape, generator=torch.Generator().manual_seed(seed))
    return replace(rollout, logprobs=noise.masked_fill(~rollout.response_mask, 0.0))


def by_transformers(path, rollout, temperature):
    """Computes the rewards of each row alone, without padding, with only transformers."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    rewards = torch.zeros(rollout.response_mask.shape)
    for row in range(len(rollout)):
        ids = rollout.ids[row][rollout.attention_mask[row]]
        count = int(rollout.response_lengths[row])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        chosen = (logits / temperature).softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].log()
        rewards[row, :count] = chosen[len(chosen) - count :] - rollout.logprobs[row, :count]
    return rewards


def test_rewards_by_hand(made, teacher, tokenizer):
    """Checks the rewards of two tokens, and their advantages with the discount 0.

    The teacher gives the tokens the probabilities 1/2 and 1/4, and the policy 1/4 and 1/2: the rewards are
    log 2 and -log 2. The third token is no action.
    """
    rollout = make_rollout(tokenizer, [("a", "bc")])
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[0.25, 0.5, 0.125]]).log()
    rollout = replace(rollout, response_mask=mask, logprobs=logprobs)

    def forward(ids, attention, width, temperature):
        assert (temperature, width) == (0.7, 3)
        return PolicyOutput(torch.tensor([[0.5, 0.25, 0.5]]).log(), None, None, None)

    scores = made(teacher, forward, temperature=0.7)(rollout)
    log2 = 0.6931472
    assert scores.total.tolist() == [0.0]
    torch.testing.assert_close(scores.per_token, torch.tensor([[log2, -log2, 0.0]]))
    rows, position = scored(rollout, scores), ScorePosition("last_token", "trained")
    rewards = position.rewards(rows.scores, torch.zeros(mask.shape), rows)
    responses = Responses.of_rollout(rows, position, rewards, rows.scores, None, 1)
    estimate = reinforce(responses, CreditOptions(gae=GAEConfig(gamma=0.0)))
    torch.testing.assert_close(estimate.advantages, torch.tensor([[log2, -log2, 0.0]]))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rewards_equal_those_of_each_row_alone(made, teacher, tokenizer, temperature):
    rollout = with_logprobs(make_rollout(tokenizer, PAIRS))
    expected = by_transformers(teacher, rollout, temperature)
    assert expected.abs().max() > 1
    for budget in (1, 40, 10_000):
        reward = made(teacher, temperature=temperature, score_tokens=budget)
        torch.testing.assert_close(reward(rollout).per_token, expected, atol=2e-5, rtol=1e-5)
    assert made.placed.calls == 1


def test_ranks_run_equally_many_forwards_and_give_the_same_rewards(made, teacher, tokenizer):
    rollout = with_logprobs(make_rollout(tokenizer, PAIRS))
    whole = made(teacher)(rollout).per_token

    def work(world):
        mine = rollout.select(torch.arange(4).chunk(2)[world.rank])
        budget = 20 if world.rank else 10_000
        reward = made(teacher, score_tokens=budget, all_reduce_max=world.max_int)
        placed = reward._teacher
        return reward(mine).per_token, placed.calls

    (first, calls), (second, others) = run_ranks(2, work)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=2e-5, rtol=1e-5)
    assert calls == others == 2


def test_a_teacher_with_other_tokens_is_refused(made, tmp_path, tokenizer):
    save_model(tmp_path / "other", LLAMA, AutoModelForCausalLM)
    other = load_tokenizer(save_tokenizer(tmp_path / "other"))
    other.hf.add_tokens(["<more>"])
    other.hf.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError) as refused:
        made(tmp_path / "other")
    assert str(refused.value) == (
        f"reward.model.path={tmp_path}/other: its tokenizer differs from the policy's, "
        f"{tmp_path}/actor-tokenizer, in 1 tokens such as '<more>'; a teacher reads the token ids of the "
        "policy, so choose a model of the same family"
    )


def test_a_logprob_that_is_not_finite_is_an_error(made, teacher, tokenizer):
    rollout = with_logprobs(make_rollout(tokenizer, PAIRS))

    def forward(ids, attention, width, temperature):
        return PolicyOutput(torch.full((len(ids), width), -torch.inf), None, None, None)

    with pytest.raises(RewardError, match="a log-prob of the teacher is not finite"):
        made(teacher, forward)(rollout)
