"""Learns from one experience on the ranks of test_rank_counts.py; rank 0 saves the weights around it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from ppo_ds.distributed.world import connect
from ppo_ds.engine.checkpoint.state import consolidated
from tests.engine import switch_worker
from tests.ppo.algo_cases import make_experience
from tests.ppo.learner_cases import learner

ROWS, MINIBATCH = 24, 12  # divisible by 1, 2, 3 and 4 ranks
EPS = 1e-2  # Adam's eps; a small eps would turn the rounding of gradients near 0 into weight changes


def main() -> None:
    folder, world = Path(sys.argv[1]), connect(5)
    made = make_experience([1 + i % 5 for i in range(ROWS)], [1 + i * 5 % 7 for i in range(ROWS)])
    # close to a fresh policy's, so that there are ratios on both sides of the clips
    old = 0.2 * made.logprobs - 3
    rows = replace(made, logprobs=old, old_logprobs=old)
    for stage in (0, 2, 3):
        actor = switch_worker.make(world, stage, eps=EPS)
        before = consolidated(actor)
        learner(world, actor, None, budget=40, minibatch_size=MINIBATCH)(rows, 0.0, 3)
        after = consolidated(actor)
        if world.is_main:
            for name, weights in (("before", before), ("after", after)):
                whole = {key: x.clone().contiguous() for key, x in weights.items()}
                save_file(whole, folder / f"{name}-{world.size}-{stage}.safetensors")
        actor.engine.destroy()
    world.close()
