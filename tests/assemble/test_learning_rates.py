"""Tests learning rates of adapters, and warnings about unusual rates and numbers of ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ppo_ds.assemble.shared import ranks_without_gpus, trained_model, unusual_rate
from ppo_ds.config.schema import learning_rate
from ppo_ds.distributed.threads import Threads
from tests.config.commands import MINIMAL, complaints, compose

LORA = "actor.lora.rank=4"


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        ([], 1e-6),
        (["actor.optim.lr=3e-6"], 3e-6),
        ([LORA], 1e-5),
        ([LORA, "actor.optim.lr=3e-6"], 3e-5),
        ([LORA, "actor.lora.lr=auto"], 1e-5),
        ([LORA, "actor.lora.lr=null"], 1e-6),
        ([LORA, "actor.lora.lr=2e-4", "actor.optim.lr=3e-6"], 2e-4),
    ],
)
def test_adapters_get_ten_times_the_rate_of_full_training(arguments: list[str], rate: float) -> None:
    assert learning_rate(compose(*MINIMAL, *arguments).actor) == pytest.approx(rate, rel=1e-12)


def test_a_wrong_rate_is_an_error() -> None:
    (line,) = complaints(*MINIMAL, LORA, "actor.lora.lr=atuo")
    assert line.startswith("actor.lora.lr=atuo: must be a number above 0 or auto")


def test_the_banner_shows_the_resolved_rate() -> None:
    role = compose(*MINIMAL, LORA).actor
    assert trained_model("actor", "org/actor", role) == (
        "actor      org/actor  bf16  ZeRO-2  learning rate 1e-05 (10 x optim.lr), cosine"
    )
    role = compose(*MINIMAL, "actor.optim.schedule=constant").actor
    assert trained_model("actor", "x", role).endswith("  learning rate 1e-06, constant")


@pytest.mark.parametrize(
    ("stage", "name", "arguments", "parameters", "words"),
    [
        ("ppo", "actor", [], 5e8, None),
        ("ppo", "actor", [], 7.6e9, None),
        ("ppo", "actor", ["actor.optim.lr=9.65e-6"], 1.3e9, None),  # InstructGPT
        ("ppo", "actor", ["actor.optim.lr=2e-4"], 1e6, None),  # the quickstart
        ("ppo", "actor", ["actor.optim.lr=5e-5"], 1.35e8, None),  # docs/smollm2
        ("ppo", "critic", ["critic.optim.lr=1e-4"], 1.35e8, None),
        ("ppo", "actor", ["actor.optim.lr=2e-4"], 1.35e8, "actor.optim.lr: the learning rate 0.0002 is 20"),
        ("ppo", "actor", ["actor.optim.lr=5e-7"], 1.35e8, "actor.optim.lr: the learning rate 5e-07 is 1/20"),
        ("ppo", "actor", [LORA], 5e8, None),
        (
            "ppo", "actor", ["actor.optim.lr=5e-5"], 5e8,
            "actor.optim.lr: the learning rate 5e-05 is 50 times the usual 1e-06 for full training of a "
            "model with 0.5 billion parameters",
        ),
        (
            "ppo", "actor", [LORA, "actor.lora.lr=1e-7"], 7.6e9,
            "actor.lora.lr: the learning rate 1e-07 is 1/50 of",
        ),
        (
            "ppo", "actor", [LORA, "actor.optim.lr=1e-8"], 7.6e9,
            "actor.optim.lr: the learning rate 1e-07 is 1/50 of",
        ),
        ("sft", "actor", [], 5e8, "actor.optim.lr: the learning rate 1e-06 is 1/20 of the usual 2e-05"),
        ("ppo", "critic", [], 7.6e9, None),
    ],
)  # fmt: skip
def test_a_rate_far_from_the_usual_one_is_a_warning(
    stage: str, name: str, arguments: list[str], parameters: float, words: str | None
) -> None:
    role = getattr(compose(*MINIMAL, *arguments), name)
    lines = unusual_rate(stage, name, role, int(parameters))
    assert len(lines) == (words is not None)
    assert words is None or lines[0].startswith(f"warning    {words}")


@pytest.mark.parametrize(
    ("device", "ranks", "trained", "warned"),
    [
        ("cpu", 2, 1.3e8, True),
        ("cpu", 1, 1.3e8, False),
        ("cpu", 2, 1e6, False),  # a small model, or adapters
        ("cuda", 2, 1.3e8, False),
    ],
)
def test_several_ranks_on_one_cpu_are_a_warning_for_a_large_model(device, ranks, trained, warned):
    world = SimpleNamespace(device=torch.device(device), threads=Threads(each=1, cores=2, ranks=ranks))
    lines = ranks_without_gpus(int(trained), world)
    assert len(lines) == warned
    assert not warned or ("130 million" in lines[0] and "run.threads=2" in lines[0])
