"""Tests that rewards with the same model share it, and that each scores as it would on its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_ds.assemble.reward_models import RewardModels
from ppo_ds.config.targets import bind
from tests.rewards.model_cases import LLAMA, save_model
from tests.rewards.reward_cases import make_rollout

CPU = SimpleNamespace(device=torch.device("cpu"))
MODEL, MIXTURE = "ppo_ds.rewards.model.model_reward", "ppo_ds.rewards.weighted.WeightedReward"


@pytest.fixture
def built(tokenizer):
    """Builds a weighted reward of model parts.

    Returns the reward, the addresses of its weights and the lines of the banner.
    """

    def built(**parts: dict[str, Any]):
        notes: list[str] = []
        services = dict(
            load_frozen=RewardModels(CPU, notes.append),
            all_reduce_max=lambda n: n,
            score_tokens=1000,
            reduce=lambda x: x,
            tokenizer=tokenizer,
            note=notes.append,
        )
        spec = {
            "_target_": MIXTURE,
            "parts": {
                name: {"reward": {"_target_": MODEL, "audit": "off", **part}} for name, part in parts.items()
            },
        }
        mixture = bind(spec, "reward")(**services)
        weights = {
            name: {p.data_ptr() for p in part.reward.scorer.module.parameters()}
            for name, part in mixture._parts.items()
        }
        return mixture, weights, notes

    return built


def test_parts_with_the_same_model_share_it(built, tokenizer, tmp_path):
    save_model(tmp_path / "rm", LLAMA)
    (tmp_path / "link").symlink_to(tmp_path / "rm")
    model = {"path": str(tmp_path / "rm"), "dtype": "fp32"}
    parts = {
        "a": {"model": model},
        "b": {"model": model | {"path": str(tmp_path / "link")}, "template": "pair"},
    }
    mixture, weights, notes = built(**parts)
    assert weights["a"] == weights["b"]
    assert notes == [
        "sharing    reward.parts.b.reward.model.path: the same as reward.parts.a.reward.model.path, in "
        "memory once"
    ]
    rollout = make_rollout(tokenizer, [("what is it", "an answer"), ("and then", "no")])
    scores = mixture(rollout).components
    for name, part in parts.items():
        torch.testing.assert_close(
            scores[name], built(**{name: part})[0](rollout).components[name], rtol=0, atol=0
        )
    assert (scores["a"] - scores["b"]).abs().min() > 1e-3  # each part uses its own template


@pytest.mark.parametrize("other", [{"dtype": "bf16"}, {"attn_implementation": "eager"}])
def test_other_settings_are_another_model(built, tmp_path, other):
    save_model(tmp_path / "rm", LLAMA)
    model = {"path": str(tmp_path / "rm"), "dtype": "fp32"}
    _, weights, notes = built(a={"model": model}, b={"model": model | other})
    assert not weights["a"] & weights["b"] and notes == []


def test_other_placements_are_not_shared(built, tmp_path):
    save_model(tmp_path / "rm", LLAMA)
    model = {"path": str(tmp_path / "rm"), "dtype": "fp32"}
    _, weights, notes = built(a={"model": model}, b={"model": model, "zero": {"offload_params": True}})
    assert not weights["a"] & weights["b"] and notes == []
