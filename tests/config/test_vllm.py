"""Tests the checks of rollout.backend=vllm."""

from __future__ import annotations

import pytest

from tests.config.commands import MINIMAL, complaints, compose

VLLM = (*MINIMAL, "rollout.backend=vllm")


def test_what_vllm_supports_is_accepted() -> None:
    config = compose(*VLLM, "sampling.top_p=0.9", "sampling.top_k=5", "sampling.min_new_tokens=2")
    assert config.rollout.vllm.sleep == "auto" and config.rollout.vllm.kv_cache_gb is None
    assert compose(*VLLM, "sampling.temperature=0.7").sampling.temperature == 0.7
    compose(*VLLM, "rollout.vllm.tensor_parallel=2", "rollout.vllm.sleep=1", ranks=4)


@pytest.mark.parametrize(
    ("setting", "value", "usual"),
    [
        ("tensor_parallel", "2", "1"),
        ("kv_cache_gb", "1.5", "null"),
        ("sleep", "1", "auto"),
        ("enforce_eager", "true", "false"),
    ],
)
def test_settings_without_the_backend_are_refused(setting: str, value: str, usual: str) -> None:
    assert complaints(*MINIMAL, f"rollout.vllm.{setting}={value}", ranks=2) == [
        f"rollout.vllm.{setting}={value}: only used with rollout.backend=vllm (it is auto); set it to {usual}"
    ]


def test_groups_must_divide_the_ranks() -> None:
    assert complaints(*VLLM, "rollout.vllm.tensor_parallel=3", ranks=4) == [
        "rollout.vllm.tensor_parallel=3: must divide the number of ranks, 4; use one of 1, 2, 4"
    ]


@pytest.mark.parametrize(
    ("setting", "value", "off"), [("top_p", "0.9", "1.0"), ("top_k", "5", "0"), ("min_new_tokens", "2", "0")]
)
def test_log_probs_of_a_truncated_distribution_are_refused(setting: str, value: str, off: str) -> None:
    assert complaints(*VLLM, "sampling.temperature=0.7", f"sampling.{setting}={value}") == [
        f"sampling.{setting}={value}: with rollout.backend=vllm and sampling.temperature=0.7, the log-probs "
        f"would be those of the truncated distribution; use sampling.{setting}={off}, sampling.temperature=1 "
        "or another rollout.backend"
    ]


def test_other_settings_that_vllm_does_not_support() -> None:
    assert complaints(*VLLM, "sampling.temperature=2.5") == [
        "sampling.temperature=2.5: rollout.backend=vllm supports 0.01 to 2; choose a temperature in this "
        "range, or another rollout.backend"
    ]
    (line,) = complaints(*VLLM, "actor.zero.stage=3", "actor.zero.generation_gather=layers")
    assert line.startswith("actor.zero.generation_gather=layers: has no effect with rollout.backend=vllm")
    (line,) = complaints(*VLLM, "rollout.vllm.sleep=3")
    assert line == "rollout.vllm.sleep=3: must be one of auto, 0, 1, 2"
