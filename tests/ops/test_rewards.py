"""Tests score shaping and token rewards: goldens of six systems, hand-computed numbers."""

import pytest
import torch

from ppo_ds.ops.sequences import last_token_index, next_token_mask, response_mask
from tests.ops.by_name import approx_kl, shape_scores, token_rewards
from tests.ops.golden import Within, assert_no_stale_entries, check, outputs

EOS = 2


def kl(c, estimator="k1"):
    return approx_kl(c.old_logprobs, c.ref_logprobs, estimator)


def mask(c, include_eos=True):
    return response_mask(c.responses, [EOS], include_eos=include_eos)[0]


def clipped(c):
    return shape_scores(c.scores, clip=c.params["clip_reward"])


def deepspeed_chat(include_eos, rubbish_beyond):
    """The position after the action mask is a state with KL and score.

    If pad == eos, the action mask excludes EOS.
    """

    def rewards(c):
        states = next_token_mask(mask(c, include_eos))
        out = token_rewards(clipped(c), states, kl(c), c.params["kl_coef"])
        return Within(out, states) if rubbish_beyond else out

    return rewards


def blog(times_mask):
    """EOS is not an action but has the score, which multiplying by the mask removes."""

    def rewards(c):
        m = mask(c, include_eos=False)
        out = token_rewards(
            shape_scores(c.scores, clip=5.0), m, kl(c), c.params["kl_coef"], place="next_token"
        )
        return out * m if times_mask else out

    return rewards


def on_last_token(clip=None, scores=None, rubbish_beyond=True):
    def rewards(c):
        out = token_rewards(shape_scores(c.scores, clip=clip), mask(c), kl(c), c.params["kl_coef"])
        return Within(out, mask(c)) if rubbish_beyond else out

    return rewards


def torchtune_states(c):
    """A response has a state one position after EOS, unless it is a single token."""
    return torch.where(mask(c).sum(1, keepdim=True) > 1, next_token_mask(mask(c)), mask(c))


def torchtune_recipe(c):
    return Within(
        token_rewards(c.scores, torchtune_states(c), kl(c), c.params["kl_coef"]), torchtune_states(c)
    )


def trl(estimator, with_score=True):
    def rewards(c):
        scores = c.scores if with_score else torch.zeros_like(c.scores)
        return token_rewards(scores, mask(c), kl(c, estimator), c.params["kl_coef"], place="next_token")

    return rewards


def penalised(mode, value):
    def scores(c):
        return shape_scores(
            c.scores, finished=torch.tensor(c.has_eos), missing_eos=mode, missing_eos_value=c.params[value]
        )

    return scores


def overlong(c):
    p = c.params
    return shape_scores(
        c.scores,
        lengths=mask(c).sum(1),
        max_new_tokens=p["max_new_tokens"],
        overlong_buffer=p["overlong_buffer"],
        overlong_factor=p["overlong_factor"],
    )


TARGETS = {
    "dschat.compute_rewards.pad_not_eos": deepspeed_chat(include_eos=True, rubbish_beyond=True),
    "dschat.rewards_zeroed.pad_not_eos": deepspeed_chat(include_eos=True, rubbish_beyond=False),
    "dschat.compute_rewards.pad_is_eos": deepspeed_chat(include_eos=False, rubbish_beyond=True),
    "dschat.rewards_zeroed.pad_is_eos": deepspeed_chat(include_eos=False, rubbish_beyond=False),
    "dschat.action_mask.pad_not_eos": mask,
    "dschat.action_mask.pad_is_eos": lambda c: mask(c, include_eos=False),
    "seed_a.compute_rewards": blog(times_mask=False),
    "seed_a.rewards_times_mask": blog(times_mask=True),
    "openrlhf.compute_reward": on_last_token(),
    "openrlhf.compute_reward.clip5": on_last_token(clip=5.0),
    "openrlhf.compute_reward.clip1": on_last_token(clip=1.0),
    "verl.token_level_scores": lambda c: token_rewards(c.scores, mask(c)),
    "verl.compute_rewards": on_last_token(),
    "torchtune.get_rewards_ppo.last_valid": on_last_token(),
    "torchtune.value_seq_idxs": lambda c: last_token_index(torchtune_states(c)),
    "torchtune.get_rewards_ppo.recipe": torchtune_recipe,
    "nemo_aligner.calculate_ppo_rewards": on_last_token(),
    "nemo_aligner.create_mask": mask,
    "trl.rewards.k1": trl("k1"),
    "trl.rewards.k3": trl("k3"),
    "trl.non_score_reward.k1": trl("k1", with_score=False),
    "trl.non_score_reward.k3": trl("k3", with_score=False),
    "openrlhf.overlong_penalty": overlong,
    "openrlhf.stop_scale_penalty": penalised("scale", "stop_scale"),
    "openrlhf.stop_fixed_penalty": penalised("set", "stop_fixed"),
    "trl.missing_eos_penalty1": penalised("subtract", "missing_eos_penalty"),
}
NOT_TARGETS = {
    "dschat.ends.*": (
        "the bound of a slice, which may lie beyond the width; the places it leaves "
        "are compared in rewards_zeroed"
    ),
    "torchtune.penalty_mask.no_eos": (
        "takes an answer whose EOS is in the last place (row 5) for one without EOS"
    ),
    "torchtune.penalty_mask.no_eos_min5": "the same, and a penalty on short answers that we do not have",
}


@pytest.mark.parametrize(("case", "key"), outputs("rewards.json", NOT_TARGETS))
def test_golden(case, key):
    check(case, key, TARGETS)


def test_every_table_entry_is_used():
    assert_no_stale_entries("rewards.json", TARGETS, NOT_TARGETS)


def test_a_mask_with_a_hole_gets_the_score_at_its_last_position():
    mask = torch.tensor([[1, 0, 1, 0]])
    assert token_rewards(torch.tensor([3.0]), mask, torch.ones(1, 4), 1.0).tolist() == [[-1.0, 0.0, 2.0, 0.0]]
