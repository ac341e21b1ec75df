"""Tests numbers that are printed in published explanations of PPO-RLHF.

The tolerances are in the files, since the sources print few digits.
"""

import pytest
import torch

from ppo_ds.algorithm.credit.gae import compute_gae
from ppo_ds.ops.sequences import last_token_index, response_mask
from tests.ops.by_name import approx_kl, policy_loss, token_rewards, value_loss
from tests.ops.golden import GOLDENS, gradient, leaf, load

EXAMPLES = {c["id"]: c for c in load(GOLDENS / "seed_examples.json")["cases"]}
ELSEWHERE = {
    "a_steps": "counts of optimizer steps: no tensor function",
    "c_reasoning_rewards": "rule rewards live in ppo_ds.rewards",
    "c_score_mix": "weighted scores live in ppo_ds.rewards",
}


def row(x):
    return torch.tensor([x], dtype=torch.float64)


def example(name):
    e = EXAMPLES[name]
    return e["inputs"], e["params"], e["outputs"], e.get("tol", 0)


def test_gae():
    i, p, out, tol = example("a_gae")
    advantages, _ = compute_gae(row(i["rewards"]), row(i["values"]), torch.ones(1, 8), **p)
    deltas, _ = compute_gae(row(i["rewards"]), row(i["values"]), torch.ones(1, 8), p["gamma"], lam=0.0)
    for name, x in {"delta": deltas, "advantage": advantages}.items():
        for t in (6, 7):
            assert x[0, t].item() == pytest.approx(out[f"{name}_{t}"], abs=tol)


def test_log_ratio_and_rewards():
    i, p, out, tol = example("a_log_ratio")
    kl = approx_kl(row(i["logprobs"]), row(i["ref_logprobs"]))
    torch.testing.assert_close(kl, row(out["log_ratio"]), rtol=0, atol=tol)
    rewards = token_rewards(row([p["score"]])[0], torch.ones(1, 8), kl, p["kl_coef"])
    expected = row([*out["kl_reward"][:-1], out["last_reward"]])
    torch.testing.assert_close(rewards, expected, rtol=0, atol=tol)


def test_ratio_and_clip_range():
    i, _, out, tol = example("a_ratio")
    args = row([i["p_new"]]).log(), row([i["p_old"]]).log()
    _, metrics = policy_loss(*args, row([1.0]), torch.ones(1, 1), clip_low=i["clip"])
    assert metrics["policy/ratio_max"].item() == pytest.approx(out["ratio"], abs=tol)
    low, high = out["clip_range"]
    for bound, advantage in (
        (high, 1.0),
        (low, -1.0),
    ):  # beyond the clip range, the objective is the bound itself
        new = args[1] + (3.0 if advantage > 0 else -3.0)
        loss, _ = policy_loss(new, args[1], row([advantage]), torch.ones(1, 1), clip_low=i["clip"])
        assert loss.item() == pytest.approx(-advantage * bound)


def test_value_clip_range():
    i, _, out, tol = example("a_value_clip")
    low, high = out["clip_range"]
    for far, bound in (
        (5.0, high),
        (-5.0, low),
    ):  # for a return beyond V, the clipped value has the larger error
        v = leaf(row([bound + 0.2 * (1 if far > 0 else -1)]))
        loss, metrics = value_loss(v, row([i["old"]]), row([far * 2]), torch.ones(1, 1), clip=i["clip"])
        assert loss.item() == pytest.approx((bound - 2 * far) ** 2 / 2, abs=tol)
        assert gradient(loss, v).item() == 0.0 and metrics["value/clipfrac"].tolist() == [1.0, 1.0]


def test_masks():
    i, _, out, _ = example("a_masks")
    ids = torch.tensor([i["sample1"], i["sample2"]])
    mask, lengths, finished = response_mask(ids, [i["eos"]], include_eos=False)
    assert mask.long().tolist() == [out["action_mask1"], out["action_mask2"]]
    assert (
        lengths[1] - 1
        == out["reward_position_sample2"]
        == last_token_index(response_mask(ids, [i["eos"]])[0])[1]
    )
    assert finished.tolist() == [False, True]


def test_final_mask():
    """Two of five tokens are the prompt and the last is padding; given lengths replace a stop token."""
    i, _, out, _ = example("c_final_mask")
    p = i["prompt_len"]
    mask, _, _ = response_mask(torch.tensor([i["seq"][p:]]), [], lengths=torch.tensor([2]))
    assert torch.nn.functional.pad(mask[0].long(), (p - 1, 0)).tolist() == out["final_mask"]
    assert i["seq"][1:] == out["labels"]


def test_every_example_is_tested():
    tested = {"a_gae", "a_log_ratio", "a_ratio", "a_value_clip", "a_masks", "c_final_mask"}
    assert tested | set(ELSEWHERE) == set(EXAMPLES)
