"""Tests that the registry tables agree with the code that they name."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import get_args, get_type_hints

import pytest
import torch

from ppo_ds.algorithm.policy.keys import POLICY_LOSSES, MayLackLowerBound, PolicyConfig
from ppo_ds.config import registry
from ppo_ds.config.registry import (
    ADVANTAGE_ESTIMATORS,
    DECODE_BACKENDS,
    KL_ESTIMATORS,
    LOSS_AGGREGATIONS,
    STAGES,
    Entry,
    import_target,
    resolve,
)
from ppo_ds.config.schema import Config
from ppo_ds.config.sections.algo import AdvantageConfig, KLConfig, LossConfig
from ppo_ds.config.sections.data import RolloutConfig
from ppo_ds.ops import advantages, kl, losses

TABLES: dict[str, Mapping[str, Entry]] = {
    name: table for name, table in vars(registry).items() if name.isupper() and isinstance(table, dict)
}
REWARDS = torch.tensor([[0.0, 1.0], [2.0, 4.0]])
MASK = torch.ones(2, 2, dtype=torch.bool)


def names(function: object, argument: str) -> set[str]:
    """Returns the values that the Literal annotation of an argument allows."""
    return set(get_args(get_type_hints(function)[argument]))


def test_the_tables_of_parts() -> None:
    assert set(TABLES) == {
        "ADVANTAGE_ESTIMATORS",
        "KL_ESTIMATORS",
        "LOSS_AGGREGATIONS",
        "DECODE_BACKENDS",
        "STAGES",
    }


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table, entries in TABLES.items() for name in entries]
)
def test_every_target_can_be_imported_and_takes_its_options(table: str, name: str) -> None:
    entry = TABLES[table][name]
    assert callable(resolve(entry))
    assert set(entry.options) <= set(inspect.signature(import_target(entry.target)).parameters)
    assert entry.description.endswith(".") and "\n" not in entry.description


@pytest.mark.parametrize(
    ("table", "function", "argument", "not_for_a_run"),
    [
        (KL_ESTIMATORS, kl.approx_kl, "estimator", set()),
        (
            {name: entry for name, entry in ADVANTAGE_ESTIMATORS.items() if entry.options},
            advantages.group_advantages,
            "kind",
            {"mean", "none"},  # mean is another name of dr_grpo; none has no baseline
        ),
    ],
)
def test_the_names_are_those_that_the_operations_take(
    table: Mapping[str, Entry], function: object, argument: str, not_for_a_run: set[str]
) -> None:
    assert set(table) == names(function, argument) - not_for_a_run
    assert all(entry.options == {argument: name} for name, entry in table.items())


def test_the_aggregations_are_those_that_the_operations_take() -> None:
    assert {name: resolve(entry) for name, entry in LOSS_AGGREGATIONS.items()} == losses.AGGREGATIONS
    assert set(losses.AGGREGATIONS) == set(get_args(losses.LossAgg))


def test_estimators_are_called_by_what_they_need() -> None:
    groups, lengths = torch.tensor([0, 0]), torch.tensor([2, 2])
    for name, entry in ADVANTAGE_ESTIMATORS.items():
        estimate = resolve(entry)
        if entry.needs_critic:
            made, returns = estimate(REWARDS, torch.zeros(2, 2), MASK, gamma=1.0, lam=1.0)
            assert made.tolist() == returns.tolist() == [[1.0, 1.0], [6.0, 4.0]]
        elif entry.needs_greedy:
            made = estimate(REWARDS, MASK, gamma=1.0, baselines=torch.tensor([1.0, 4.0]))
            assert made.tolist() == [[0.0, 0.0], [2.0, 0.0]]
        elif entry.needs_parts:
            made = estimate(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), groups, weights=torch.ones(2))
            assert made.shape == (2,) and made[0] < made[1], name
        elif entry.needs_group:
            made = estimate(torch.tensor([1.0, 3.0]), groups, lengths=lengths)
            assert made.shape == (2,) and made[0] < made[1], name
        else:
            assert estimate(REWARDS, MASK, gamma=1.0).tolist() == [[1.0, 1.0], [6.0, 4.0]]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_has_a_function_that_takes_its_keys(name: str) -> None:
    variant = POLICY_LOSSES[name]
    assert callable(import_target(variant.function)) and (variant.__doc__ or "").endswith(".")
    defaults = variant(clip_high=4) if issubclass(variant, MayLackLowerBound) else variant()
    logprobs = torch.tensor([[-1.0, -2.0]])
    options = {"agg": "token_mean", **defaults.arguments()}
    if defaults.selection is not None:
        selected = import_target(defaults.selection)(
            logprobs, MASK[:1].float(), MASK[:1], torch.Generator(), **defaults.selection_arguments()
        )
        options["selected"] = selected
    loss, _ = import_target(defaults.function)(logprobs, logprobs, torch.ones(1, 2), MASK[:1], **options)
    assert loss.isfinite()


def test_the_flags_say_what_the_losses_do() -> None:
    logprobs, old, advantage = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2)
    for name, entry in POLICY_LOSSES.items():
        wide = {key: 9.0 for key in ("clip_low", "clip_high") if key in entry.model_fields}
        options = dict(ratio="sequence", agg="seq_mean_token_sum", **wide)
        args = logprobs, old, advantage, MASK[:1]
        if entry.selection is not None:
            assert callable(import_target(entry.selection))
            options |= {"selected": torch.tensor([[True, False]])}
        loss = partial(import_target(entry.function), **entry.options)
        summed, _ = loss(*args, **options)
        once, _ = loss(*args, **options | {"ratio": "token" if entry.own_ratio else "sequence"})
        assert torch.equal(summed, once), name  # a loss that computes its own ratio ignores the given one
        other, _ = loss(*args, **options | {"ratio": "token"})
        assert torch.equal(summed, other) == (entry.own_ratio or name == "reinforce"), name


def test_the_flags_say_what_the_estimators_do() -> None:
    groups, lengths, scores = torch.tensor([0, 0]), torch.tensor([2, 2]), torch.tensor([1.0, 3.0])
    for name, entry in ADVANTAGE_ESTIMATORS.items():
        if entry.needs_group and not entry.needs_parts:
            larger = resolve(entry)(10 * scores, groups, lengths=lengths)
            same = torch.allclose(larger, resolve(entry)(scores, groups, lengths=lengths), atol=1e-4)
            assert same == (entry.divides_by_std or entry.divides_by_mean), name


def test_kl_estimators_of_losses_only_have_a_gradient_of_their_own() -> None:
    logprobs, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.5])
    made = {}
    for name, entry in KL_ESTIMATORS.items():
        value = resolve(entry)(logprobs, ref)
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
        (LossConfig, "agg"): set(LOSS_AGGREGATIONS),
        (RolloutConfig, "backend"): {"auto", *DECODE_BACKENDS},
    }
    for (section, field), expected in fields.items():
        (choice,) = section.model_fields[field].metadata
        assert set(choice.choices) == expected


def test_a_backend_that_decodes_every_model_ends_auto() -> None:
    in_auto = [entry for entry in DECODE_BACKENDS.values() if entry.in_auto]
    assert in_auto[-1].refusal is None
    assert all(callable(import_target(entry.refusal)) for entry in DECODE_BACKENDS.values() if entry.refusal)


def test_the_stages() -> None:
    assert list(STAGES) == ["ppo", "sft", "reward_model"]


def test_the_tables_import_no_torch() -> None:
    code = "import sys, ppo_ds.config.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
