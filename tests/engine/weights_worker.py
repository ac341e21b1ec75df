"""Compares the weights that HybridActor.weights yields with an exported model, for test_weights.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.hybrid import HybridActor
from tests.engine.rank_results import Case, run_cases, same
from tests.engine.switch_worker import KINDS, everything, make, sharded_again, train

ELEMENTS = 100  # fewer than a decoder layer has, so that the weights come in several chunks


def exported(actor: HybridActor, folder: Path) -> dict[str, Tensor]:
    """Returns the weights in the file that an export of the actor writes; {} except on rank 0."""
    state = consolidated(actor)
    if state is None:
        return {}
    actor.module.save(folder, {name.removeprefix("lm."): tensor for name, tensor in state.items()})
    return load_file(folder / "model.safetensors")


def case(world: World, root: Path, stage: int, kind: str) -> Case:
    actor = make(world, stage, gather_elements=ELEMENTS, engine=True, **KINDS[kind])
    other = make(world, stage, **KINDS[kind])
    phases: list[dict[str, Tensor]] = []
    left = []

    @contextmanager
    def engine(weights: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
        phases.append(dict(weights))
        yield
        left.append(True)

    actor.connect(engine)
    equal, steps, order = [], [], []
    for step in range(4):
        with actor.generation_mode(), actor.generation_mode():
            pass
        file = exported(actor, root / f"{stage}-{kind}-{step}")
        if world.is_main:
            equal.append(same(phases[-1], file))
        order.append(world.gather_objects(list(phases[-1])))
        steps.append(train(actor) == train(other))
    changed = [not same(a, b) for a, b in zip(phases, phases[1:], strict=False)]
    everywhere = [world.concat(phases[-1][name].flatten().float()) for name in phases[-1]]
    return {
        "case": f"{stage} {kind}",
        "equal": all(equal),
        "changed": all(changed) and len(phases) == len(left) == 4,
        "ranks": all(a == b for a, b in order) and all(torch.equal(*x.chunk(2)) for x in everywhere),
        "names": list(phases[-1]),
        "training": all(steps) and same(everything(actor), everything(other)),
        "sharded": stage < 3 or kind == "tied" or sharded_again(actor),  # parameters of "tied" stay whole
        "gb": actor.take_switched_gb(),
        "lockstep": actor.lockstep,
    }


def cases(world: World, root: Path, mode: str) -> Iterator[Case]:
    for stage in (0, 1, 2, 3):
        for kind in KINDS if stage in (0, 3) else ("plain",):
            yield case(world, root, stage, kind)


def main() -> None:
    run_cases(cases)
