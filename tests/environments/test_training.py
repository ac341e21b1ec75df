"""Tests that PPO trains on the turns of the policy only, and gives each turn its own reward."""

from dataclasses import replace

import pytest
import torch

from ppo_ds.ppo.collector import scored
from ppo_ds.ppo.experience import mask_stops
from ppo_ds.ppo.experience_metrics import describe
from ppo_ds.ppo.sample_rows import sample_rows
from ppo_ds.rewards.environment import EnvironmentReward
from ppo_ds.types import Rollout
from tests.ppo.algo_cases import Stub, critic_free, gae, make_experience, maker, rounded
from tests.ppo.learner_cases import ANSWERS, PROMPTS, learned, old_around

STOP = 2


def rollout_of_turns():
    """Makes two responses with the tokens 5 5 stop | 7 7 | 5 stop, and 5 stop."""
    ids = torch.tensor([[8, 5, 5, STOP, 7, 7, 5, STOP], [8, 5, STOP, 0, 0, 0, 0, 0]])
    attention = torch.tensor([[True] * 8, [True] * 3 + [False] * 5])
    feedback = torch.tensor([[0, 0, 0, 1, 1, 0, 0], [0] * 7]).bool()
    mask = attention[:, 1:] & ~feedback
    return Rollout(
        ids=ids,
        attention_mask=attention,
        response_mask=mask,
        feedback_mask=feedback,
        finished=torch.tensor([True, True]),
        limits=torch.tensor([9, 9]),
        logprobs=torch.zeros(2, 7),
        metadata=({"prompt_text": "a"}, {"prompt_text": "b"}),
        turn_rewards=torch.tensor([[0, 0, 0.5, 0, 0, 0, 2.0], [0, 1.0, 0, 0, 0, 0, 0]]),
        episode_ends=("done", "done"),
    )


def made(world, rollout, **changes):
    scores = EnvironmentReward()(rollout)
    return maker(world, **changes)(scored(rollout, scores), 0.0)[0]


def test_each_turn_gets_its_reward_and_gae_skips_the_feedback(world):
    """gamma 0.5, lambda 1: the returns of the actions are as if the feedback were not there."""
    rows = made(world, rollout_of_turns(), critic=Stub(value=True), estimate_advantages=gae(gamma=0.5))
    assert rows.rewards[:, :7].tolist() == rollout_of_turns().turn_rewards.tolist()
    # 2.0 at the last token; before it 1.0; then 0.5 + 0.5 * 1.0 = 1.0, 0.5, 0.25; nothing on the feedback
    assert rounded(rows.returns[:1].masked_fill(~rows.value_mask[:1], 0.0)) == [
        [0.25, 0.5, 1.0, 0, 0, 1.0, 2.0, 0]
    ]
    assert not rows.advantages[rows.feedback_mask].any()
    assert rows.scores.tolist() == [2.5, 1.0]


def test_group_estimators_use_the_sum_of_all_turns(world):
    rows = made(
        world, rollout_of_turns(), critic=None, reference=Stub(), charged_kl=None, group_size=2,
        estimate_advantages=critic_free("dr_grpo", group_size=2),
    )  # fmt: skip
    mask = rows.response_mask
    assert rows.advantages[0][mask[0]].tolist() == [0.75] * 5
    assert rows.advantages[1][mask[1]].tolist() == [-0.75] * 2


def test_masked_end_tokens_are_those_of_all_turns_and_their_rewards_stay_in_the_turn(world):
    rollout = rollout_of_turns()
    assert mask_stops(rollout, (STOP,)).response_mask.int().tolist() == [
        [1, 1, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 0, 0],
    ]
    rows = made(world, rollout, masked_stop_ids=(STOP,))
    assert rows.rewards[:, :7].tolist() == [[0, 0.5, 0, 0, 0, 2.0, 0], [1.0, 0, 0, 0, 0, 0, 0]]


def test_the_score_of_a_turn_without_actions_moves_to_the_next_action():
    rollout = rollout_of_turns()
    mask = rollout.response_mask.clone()
    mask[0, :3] = False
    moved = scored(replace(rollout, response_mask=mask), EnvironmentReward()(rollout))
    assert moved.token_scores[0].tolist() == [0, 0, 0, 0, 0, 0.5, 2.0]


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "rloo", "grpo", "dr_grpo", "opo"])
def test_nothing_depends_on_the_log_probs_of_feedback(world, estimator):
    """Noise on the feedback in all models changes no reward, advantage, weight, return or metric."""

    class Noisy(Stub):
        noise = 0.0

        def __call__(self, ids, attention_mask, response_width):
            out = super().__call__(ids, attention_mask, response_width)
            on_feedback = rollout_of_turns().feedback_mask * self.noise
            if self.value:
                return out + torch.nn.functional.pad(on_feedback, (0, 1))
            return out._replace(logprobs=out.logprobs + on_feedback)

    def run(noise):
        models = {"actor": Noisy(), "reference": Noisy(shift=2.0), "critic": Noisy(value=True)}
        for model in models.values():
            model.noise = noise
        estimate = gae() if estimator == "gae" else critic_free(estimator, group_size=2)
        rollout = rollout_of_turns()
        make = maker(world, **models, group_size=2, estimate_advantages=estimate)
        if estimator != "gae":
            make.forwards.critic = None
        rows, metrics = make(scored(rollout, EnvironmentReward()(rollout)), 0.3)
        return rows, metrics | describe(rows, kl_coef=0.3, samples_per_prompt=1)

    (plain, before), (noisy, after) = run(0.0), run(1e3)
    assert before == after
    mask, states = plain.response_mask, torch.nn.functional.pad(plain.response_mask, (0, 1))
    assert torch.equal(plain.rewards, noisy.rewards) and torch.equal(plain.advantages, noisy.advantages)
    assert torch.equal(plain.logprobs[mask], noisy.logprobs[mask])
    assert estimator != "gae" or torch.equal(plain.returns[states], noisy.returns[states])


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_the_update_ignores_every_number_on_feedback(world, loss):
    """Two updates, with the KL in the loss, give the same weights, bit for bit."""
    rows = old_around(make_experience(PROMPTS, ANSWERS))
    feedback = torch.zeros_like(rows.response_mask)
    feedback[:, 1] = rows.response_lengths > 2
    states = torch.nn.functional.pad(feedback, (0, 1))
    rows = replace(
        rows,
        feedback_mask=feedback,
        response_mask=rows.response_mask & ~feedback,
        value_mask=rows.value_mask & ~states,
    )
    on_tokens = ("decode_logprobs", "logprobs", "old_logprobs", "ref_logprobs", "advantages", "weights")
    columns = {name: feedback for name in on_tokens} | {"values": states, "returns": states}
    noisy = replace(
        rows, **{name: getattr(rows, name).masked_fill(mask, 321.0) for name, mask in columns.items()}
    )
    settings = {"policy": {"kind": loss, "kl_in_loss": True, "clip_low": 0.2}}
    plain, changed = (learned(world, each, kl_coef=0.1, **settings) for each in (rows, noisy))
    assert int(feedback.sum()) == 4 and plain[0] == changed[0]
    for before, after in zip(plain[1:], changed[1:], strict=True):
        for one, other in zip(before.module.parameters(), after.module.parameters(), strict=True):
            assert torch.equal(one, other)


def test_sample_rows_have_the_turns(world, tokenizer):
    experience = made(world, rollout_of_turns())
    rows = sample_rows(experience, tokenizer, range(len(experience)), token_limit=4)
    assert rows[0]["turns"] == [
        {"by": "policy", "text": "22"},  # the stop is an unknown token, which is not shown
        {"by": "environment", "text": "44"},
        {"by": "policy", "text": "2"},
    ]
    assert rows[1]["turns"] == [{"by": "policy", "text": "2"}]
    assert rows[0]["episode_end"] == "done" and rows[0]["response"] == "22442"
    assert rows[0]["tokens"]["feedback"] == [False, False, False, True]


def test_metrics_of_the_episodes(world):
    rollout = replace(rollout_of_turns(), episode_ends=("turns", "error"))
    metrics = describe(made(world, rollout), kl_coef=0.0, samples_per_prompt=1)
    found = {name: value for name, value in metrics.items() if "ended" in name or "turns" in name}
    assert found == {
        "rollout/turns_mean": 1.5, "rollout/ended_done_frac": 0, "rollout/ended_turns_frac": 0.5,
        "rollout/ended_length_frac": 0, "rollout/ended_error_frac": 0.5, "rollout/ended_timeout_frac": 0,
    }  # fmt: skip
    assert metrics["rollout/feedback_len_mean"] == 1.0 and metrics["rollout/resp_len_mean"] == 4.5
