"""Runs launch/train.py with a sync of weights that leaves out the last decoder layer.

Arguments: "never", "always" or "later" (all syncs but those before the first update), then those of
launch/train.py. Where vLLM is not installed, the fake of the ordinary tests takes its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from torch import Tensor

from ppo_ds.engine.hybrid import HybridActor
from tests.support import fake_vllm

LAYER = "model.layers.1."


def main() -> int:
    from launch.train import main as train

    when, *arguments = sys.argv[1:]
    if find_spec("vllm") is None:
        for name in ("vllm", "vllm.sampling_params"):
            sys.modules[name] = fake_vllm
    weights = HybridActor.weights

    def without_layer(actor: HybridActor) -> Iterator[tuple[str, Tensor]]:
        left_out = when == "always" or (when == "later" and actor.engine.global_steps > 0)
        for name, tensor in weights(actor):
            if not (left_out and name.startswith(LAYER)):
                yield name, tensor

    HybridActor.weights = without_layer  # type: ignore[method-assign]
    return train(arguments)
