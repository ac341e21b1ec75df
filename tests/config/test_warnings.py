"""Tests that settings that are allowed but known to be wrong give one line with the reason."""

from __future__ import annotations

import pytest

from ppo_ds.config.warnings import slow_bf16, warnings
from tests.config.commands import MINIMAL, compose

LOSS, SEQUENCE, NEXT = (
    "algo.kl.place=loss",
    "algo.action_level=sequence",
    "algo.reward_shaping.score_position=next_token",
)
RLOO = ["algo.advantage.estimator=rloo", "rollout.samples_per_prompt=2"]


def said(*arguments: str) -> list[str]:
    config = compose(*MINIMAL, *arguments)
    return warnings(config, hides_stops=config.algo.train_on_eos is False)


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (
            [LOSS],
            "kl.estimator=k1 as a loss has no gradient in expectation",
        ),  # the default estimator k1 is meant for a penalty in the reward
        ([LOSS, "algo.kl.estimator=abs"], "kl.estimator=abs as a loss does not have the gradient of any KL"),
        (
            [SEQUENCE, "algo.value.position=response_last"],
            "value.position=response_last is V(prompt, response), which is no baseline",
        ),
        (
            ["algo.old_policy=lagged", "algo.lag=3"],
            "old_policy=lagged: a copy that is up to 2 updates old did not generate the responses",
        ),
        (["algo.entropy={coef:0.01,kind:sample}"], "entropy.kind=sample has no gradient in expectation"),
        (
            [NEXT, "algo.value.next_state=ignored"],
            "value.next_state=ignored loses the score of every response that ends with an end token",
        ),
        ([NEXT, "algo.value.next_state=ignored", SEQUENCE], "value.next_state=ignored loses the score"),
        ([NEXT, "algo.value.next_state=ignored", *RLOO], "value.next_state=ignored loses the score"),
        (
            [NEXT, "algo.value.next_state=untrained"],
            "value.next_state=untrained pays the score in a state whose value is not trained",
        ),
        (
            ["algo.train_on_eos=false"],
            "train_on_eos=false: the end token is not an action here, so the decision to stop is not trained",
        ),
        (
            ["algo.gae={gamma:0.5,lam:0.9}"],
            "gae.gamma=0.5 x gae.lam=0.9: the score reaches only the last few tokens",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_named_with_its_reason(arguments: list[str], mistake: str) -> None:
    (line,) = said(*arguments)
    assert line.startswith(f"warning    algo: {mistake}") and ";" not in line and "\n" not in line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [LOSS, "algo.kl.estimator=k2"],
        [LOSS, "algo.kl.estimator=k3"],
        [LOSS, "algo.kl.coef=0"],
        ["algo.kl.estimator=abs"],
        [SEQUENCE],
        ["algo.entropy.kind=sample"],  # the coefficient is 0
        ["algo.entropy.coef=0.01"],
        [NEXT],
        ["algo.value.next_state=ignored"],
        [NEXT, "algo.value.next_state=untrained", *RLOO],  # RLOO has no values
        ["algo.train_on_eos=null"],
        ["algo.gae={gamma:0.5,lam:1.0}"],
        ["algo.gae.lam=0.1", *RLOO],
        ["algo.gae.lam=0.1", SEQUENCE],
        ["sampling.temperature=0.7"],
    ],
    ids=" ".join,
)
def test_nothing_is_said_of_what_is_sound(arguments: list[str]) -> None:
    assert said(*arguments) == []


def test_several_mistakes_are_one_line() -> None:
    (line,) = said(LOSS, "algo.train_on_eos=false", "algo.old_policy=lagged")
    assert [part.split("=")[0].split()[-1] for part in line.split("; ")] == [
        "kl.estimator",
        "old_policy",
        "train_on_eos",
    ]


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("sampling.top_k=50", "top_k=50 sampling.top_p=1:"),
        ("sampling.top_p=0.9", "top_k=0 sampling.top_p=0.9:"),
    ],
)
def test_a_narrowed_sampler_has_a_line_of_its_own(argument: str, named: str) -> None:
    (line,) = said(argument)
    assert line.startswith(f"warning    sampling.{named}")
    assert len(said(argument, LOSS)) == 2


def test_where_the_tokenizer_decides_about_the_end_token():
    config = compose(*MINIMAL, "algo.train_on_eos=null")
    assert warnings(config, hides_stops=False) == []
    (line,) = warnings(config, hides_stops=True)
    assert line.startswith("warning    algo: train_on_eos=null: the end token is not an action here")


def test_a_shortest_length_is_a_warning_of_the_sampler():
    (line,) = said("sampling.min_new_tokens=2")
    assert line.startswith("warning    sampling.min_new_tokens=2: no end token is sampled before it")


def test_bf16_that_the_processor_emulates_is_named() -> None:
    mixed = compose(*MINIMAL, "actor.model.dtype=fp32", "reference.model.dtype=bf16")
    assert slow_bf16(mixed, computes_bf16=False) == [
        "warning    reference.model.dtype=bf16: this processor has no bf16 instructions, and emulated bf16 "
        "is 3 to 20 times slower than fp32; set the dtype to fp32"
    ]
    whole = compose(*MINIMAL, "actor.model.dtype=bf16")
    (line,) = slow_bf16(whole, computes_bf16=False)
    assert line.startswith(
        "warning    actor.model.dtype=bf16 critic.model.dtype=bf16 reference.model.dtype=bf16: "
    )
    assert slow_bf16(whole, computes_bf16=True) == slow_bf16(whole, computes_bf16=None) == []
    assert slow_bf16(compose(*MINIMAL, "actor.model.dtype=fp32"), computes_bf16=False) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["algo=dr_grpo", "rollout.samples_per_prompt=2"], ["actor"]),
        (["critic.share_trunk=true"], ["actor", "reference"]),
        (["actor.lora.rank=2"], ["actor", "critic"]),  # the reference is the actor without its adapters
        (["algo.kl.place=none", "algo.kl.after_update=true"], ["actor", "critic", "reference"]),
        (["reward=model", "reward.model.path=org/reward"], ["actor", "critic", "reference", "reward"]),
        (["actor.model.dtype=fp32", "reward=model", "reward.model.path=org/reward"], ["reward"]),
        (
            ["actor.model.dtype=fp32", "reward=minimind", "reward.parts.model.reward.model.dtype=bf16"],
            ["reward.parts.model.reward"],
        ),
        (["reward=internlm2_reward"], ["actor", "critic", "reference"]),  # its config file sets fp16
    ],
    ids=lambda value: " ".join(value),
)
def test_slow_bf16_names_what_is_built_and_no_more(arguments: list[str], named: list[str]) -> None:
    other_reward = any(argument.startswith("reward=") for argument in arguments)
    minimal = [argument for argument in MINIMAL if not (other_reward and argument.startswith("reward"))]
    (line,) = slow_bf16(compose(*minimal, *arguments), computes_bf16=False)
    assert line.split(": ")[0].split()[1:] == [f"{name}.model.dtype=bf16" for name in named]
