"""The random states of one rank: torch (CPU and its GPU), numpy, python. On disk as safetensors, no pickles."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.files import sha256, write_tensors


@dataclass(frozen=True)
class RandomStates:
    """Where all generators of one rank stood at one moment."""

    tensors: dict[str, Tensor]  # torch, numpy, python, and cuda on a GPU
    rest: dict[str, Any]  # what numpy and python keep beside their words


def take_rng(world: World) -> RandomStates:
    """As they are now. Not a collective, as all here."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, gauss_next = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if world.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(world.device)
    return RandomStates(
        tensors, {"numpy": [int(position), int(has_gauss), float(gauss)], "python": [version, gauss_next]}
    )


def put_rng(states: RandomStates, world: World) -> None:
    position, has_gauss, gauss = states.rest["numpy"]
    version, gauss_next = states.rest["python"]
    torch.set_rng_state(states.tensors["torch"])
    np.random.set_state(
        ("MT19937", states.tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss)
    )
    random.setstate((version, tuple(states.tensors["python"].tolist()), gauss_next))
    if world.device.type == "cuda" and "cuda" in states.tensors:
        torch.cuda.set_rng_state(states.tensors["cuda"], world.device)


@contextmanager
def undisturbed(world: World) -> Iterator[None]:
    """Whatever is drawn inside, what comes after draws as if it had not been."""
    before = take_rng(world)
    try:
        yield
    finally:
        put_rng(before, world)


def rng_file(directory: Path, rank: int) -> Path:
    return directory / f"rng_rank_{rank:05d}.safetensors"


def save_rng(directory: Path, world: World, states: RandomStates | None = None) -> Path:
    """Each rank writes its own file: ``states``, or as they are now."""
    states = states or take_rng(world)
    path = rng_file(directory, world.rank)
    write_tensors(path, states.tensors, metadata={"rest": json.dumps(states.rest)})
    return path


def load_rng(directory: Path, world: World) -> None:
    """Where the checkpoint had fewer ranks, this one is seeded anew, from rank 0's state and its own number."""
    path = rng_file(directory, world.rank)
    if not path.exists():
        _seed_all(
            int(hashlib.sha256(f"{sha256(rng_file(directory, 0))} {world.rank}".encode()).hexdigest()[:8], 16)
        )
        return
    with safe_open(path, framework="pt") as file:
        put_rng(
            RandomStates(
                {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["rest"])
            ),
            world,
        )  # noqa: SIM118


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def random_states(world: World) -> Callable[[], None]:
    """This rank's as they are now, in memory: what is returned puts them back."""
    return partial(put_rng, take_rng(world), world)
