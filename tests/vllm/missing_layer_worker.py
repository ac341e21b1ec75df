"""Runs launch/train.py with an engine that ignores the last decoder layer when it receives the weights.

Arguments: "always" or "later" (all syncs but those before the first update), then those of launch/train.py.
Where vLLM is not installed, the fake of the ordinary tests takes its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.rollout import vllm_support
from ppo_ds.rollout.vllm import VLLMGenerator
from tests.support import fake_vllm

LAYER = "model.layers.1."


def main() -> int:
    from launch.train import main as train

    when, *arguments = sys.argv[1:]
    if find_spec("vllm") is None:
        for name in fake_vllm.MODULES:
            sys.modules[name] = fake_vllm
        vllm_support.version = lambda package: fake_vllm.__version__
    weights, with_tied, steps = HybridActor.weights, VLLMGenerator._with_tied, [0]

    def sent(actor: HybridActor, **options: bool) -> Iterator[tuple[str, Tensor]]:
        steps.append(actor.engine.global_steps)
        return weights(actor, **options)

    def received(*arguments: Any) -> Iterator[tuple[str, Tensor]]:
        ignored = when == "always" or steps[-1] > 0
        for name, tensor in with_tied(*arguments):
            if not (ignored and name.startswith(LAYER)):
                yield name, tensor

    HybridActor.weights = sent  # type: ignore[method-assign]
    VLLMGenerator._with_tied = received  # type: ignore[method-assign]
    return train(arguments)
