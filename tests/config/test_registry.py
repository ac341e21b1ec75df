"""Tests that the registry tables agree with the code that they name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from ppo_ds.algorithm.credit.keys import ADVANTAGE_ESTIMATORS, AdvantageConfig, GAEConfig
from ppo_ds.algorithm.credit.responses import CreditOptions
from ppo_ds.algorithm.kl.keys import KL_CONTROLLERS, KL_ESTIMATORS, KLConfig
from ppo_ds.algorithm.loss.keys import LOSS_AGGREGATIONS, LossConfig
from ppo_ds.algorithm.policy.keys import POLICY_LOSSES, MayLackLowerBound, PolicyConfig
from ppo_ds.config.registry import STAGES, Entry, import_target
from ppo_ds.config.schema import Config
from ppo_ds.rollout.keys import BACKENDS, RolloutConfig
from tests.ops.by_name import policy_loss, responses, with_last_state

TABLES: dict[str, Mapping[str, Entry]] = {"STAGES": STAGES, "KL_ESTIMATORS": KL_ESTIMATORS}
REWARDS = torch.tensor([[0.0, 1.0], [2.0, 4.0]])
MASK = torch.ones(2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table, entries in TABLES.items() for name in entries]
)
def test_every_target_can_be_imported(table: str, name: str) -> None:
    entry = TABLES[table][name]
    assert callable(import_target(entry.target))
    assert entry.description.endswith(".") and "\n" not in entry.description


def estimated(entry: type[AdvantageConfig], rewards: Tensor, **columns: object) -> Tensor:
    """Calls an estimator of two responses to one prompt, whose rewards [2,2] are all at actions."""
    given = responses(
        with_last_state(rewards), with_last_state(MASK.bool()), groups=torch.zeros(2), **columns
    )
    options = CreditOptions(gae=GAEConfig(lam=1.0), part_weights={"a": 1.0, "b": 1.0})
    return import_target(entry.function)(given, options).advantages


def test_estimators_are_called_with_what_they_need() -> None:
    for name, entry in ADVANTAGE_ESTIMATORS.items():
        needs: dict[str, object] = {}
        if entry.needs_critic:
            needs["values"] = torch.zeros(2, 3)
        if entry.needs_greedy:
            needs["baselines"] = torch.tensor([1.0, 4.0])
        if entry.needs_parts:
            needs["components"] = ({"a": 1.0, "b": 0.0}, {"a": 3.0, "b": 0.0})
        made = estimated(entry, REWARDS, **needs)
        if entry.needs_greedy:
            assert made.tolist() == [[0.0, 0.0], [2.0, 0.0]]
        elif entry.needs_group:
            assert (made[:, 0] == made[:, 1]).all() and made[0, 0] < made[1, 0], name
        else:
            assert made.tolist() == [[1.0, 1.0], [6.0, 4.0]]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_has_a_function_that_takes_its_keys(name: str) -> None:
    variant = POLICY_LOSSES[name]
    assert callable(import_target(variant.function)) and (variant.__doc__ or "").endswith(".")
    defaults = variant(clip_high=4) if issubclass(variant, MayLackLowerBound) else variant()
    logprobs = torch.tensor([[-1.0, -2.0]])
    keys = {key: getattr(defaults, key) for key in variant.model_fields if key != "loss"}
    selected = None
    if defaults.selection is not None:
        selected = import_target(defaults.selection)(
            logprobs, MASK[:1].float(), MASK[:1], torch.Generator(), defaults
        )
    ones = torch.ones(1, 2)
    loss, _ = policy_loss(logprobs, logprobs, ones, MASK[:1], kind=name, selected=selected, **keys)
    assert loss.isfinite()


def test_the_flags_say_what_the_losses_do() -> None:
    logprobs, old, advantage = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2)
    args = logprobs, old, advantage, MASK[:1]
    for name, entry in POLICY_LOSSES.items():
        keys = [key for key in ("clip_low", "clip_high") if key in entry.model_fields]
        options: dict[str, object] = dict.fromkeys(keys, 0.9)
        if entry.selection is not None:
            assert callable(import_target(entry.selection))
            options |= {"selected": torch.tensor([[True, False]])}
        tokens, of_response = (
            policy_loss(*args, kind=name, ratio=ratio, agg="seq_mean_token_sum", **options)[0]
            for ratio in ("token", "sequence")
        )
        ignores = entry.ratio is not None or name in ("gmpo", "reinforce")
        assert torch.equal(tokens, of_response) == ignores, name


def test_the_flags_say_what_the_estimators_do() -> None:
    for name, entry in ADVANTAGE_ESTIMATORS.items():
        if entry.needs_group and not entry.needs_parts:
            same = torch.allclose(estimated(entry, 10 * REWARDS), estimated(entry, REWARDS), atol=1e-4)
            assert same == (entry.divides_by_std or name == "maxrl"), name


def test_kl_estimators_of_losses_only_have_a_gradient_of_their_own() -> None:
    logprobs, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.5])
    made = {}
    for name, entry in KL_ESTIMATORS.items():
        value = import_target(entry.target)(logprobs, ref)
        (gradient,) = torch.autograd.grad(value.sum(), logprobs)
        made[name] = (value.detach().item(), gradient.item())
    for name, entry in KL_ESTIMATORS.items():
        if not entry.in_reward:
            assert made[name] == pytest.approx((made[name.removesuffix("+")][0], made["k2"][1]))


def test_the_config_accepts_exactly_the_names_of_the_tables() -> None:
    fields = {
        (Config, "stage"): set(STAGES),
        (AdvantageConfig, "estimator"): set(ADVANTAGE_ESTIMATORS),
        (PolicyConfig, "loss"): set(POLICY_LOSSES),
        (KLConfig, "estimator"): set(KL_ESTIMATORS),
        (KLConfig, "controller"): set(KL_CONTROLLERS),
        (LossConfig, "agg"): set(LOSS_AGGREGATIONS),
        (RolloutConfig, "backend"): set(BACKENDS),
    }
    for (section, field), expected in fields.items():
        (choice,) = section.model_fields[field].metadata
        assert set(choice.choices) == expected


def test_a_backend_that_decodes_every_model_ends_auto() -> None:
    in_auto = [backend for backend in BACKENDS.values() if backend.in_auto]
    assert in_auto[-1].refusal is None
    assert all(callable(import_target(one.refusal)) for one in BACKENDS.values() if one.refusal)


def test_the_stages() -> None:
    assert list(STAGES) == ["ppo", "sft", "reward_model"]


def test_the_tables_import_no_torch() -> None:
    code = "import sys, ppo_ds.config.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
