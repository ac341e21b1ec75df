"""Random states of one rank (torch on CPU and GPU, numpy, python), stored without pickle."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppo_ds.distributed.world import World, seed_everything
from ppo_ds.engine.checkpoint.files import sha256, write_tensors

MT19937_WORDS = 624  # number of words in the state of numpy's generator


@dataclass(frozen=True)
class RandomStates:
    """States of all generators of one rank at one moment."""

    tensors: dict[str, Tensor]  # by generator: torch, numpy, python, and cuda on a GPU
    rest: dict[str, Any]  # the fields of numpy's and python's states that are not tensors


def get_rng(world: World) -> RandomStates:
    """Returns the current states of the random generators. No function of this module is a collective."""
    numpy = np.random.get_state(legacy=False)
    version, words, gauss_next = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if world.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(world.device)
    position, has_gauss, gauss = numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]
    return RandomStates(
        tensors, {"numpy": [int(position), int(has_gauss), float(gauss)], "python": [version, gauss_next]}
    )


def set_rng(states: RandomStates, world: World) -> None:
    position, has_gauss, gauss = states.rest["numpy"]
    version, gauss_next = states.rest["python"]
    torch.set_rng_state(states.tensors["torch"])
    words = states.tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, position, has_gauss, gauss))
    random.setstate((version, tuple(states.tensors["python"].tolist()), gauss_next))
    if world.device.type == "cuda" and "cuda" in states.tensors:
        torch.cuda.set_rng_state(states.tensors["cuda"], world.device)


@contextmanager
def fork_rng(world: World) -> Iterator[None]:
    """Restores the random states at the end of the block, so that draws in it do not affect the run."""
    before = get_rng(world)
    try:
        yield
    finally:
        set_rng(before, world)


def rng_file(directory: Path, rank: int) -> Path:
    return directory / f"rng_rank_{rank:05d}.safetensors"


def save_rng(directory: Path, world: World) -> Path:
    """Writes this rank's current states and returns the file."""
    states, path = get_rng(world), rng_file(directory, world.rank)
    write_tensors(path, states.tensors, metadata={"rest": json.dumps(states.rest)})
    return path


def load_rng(directory: Path, world: World) -> None:
    """Restores this rank's states.

    If the saved run had fewer ranks, a rank without a file is seeded from rank 0's file and the rank number.
    Raises OSError if a file has no valid states. numpy does not check states, and a later draw would crash.
    """
    path = rng_file(directory, world.rank)
    if not path.exists():
        text = f"{sha256(rng_file(directory, 0))} {world.rank}"
        seed_everything(int(hashlib.sha256(text.encode()).hexdigest()[:8], 16))
        return
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            states = RandomStates(tensors, json.loads(file.metadata()["rest"]))
        check_rng(states)
        set_rng(states, world)
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
        raise OSError(f"{path}: is damaged: {error}; use another checkpoint") from error


def check_rng(states: RandomStates) -> None:
    """Raises ValueError or TypeError for invalid states that numpy or python would accept."""
    position, has_gauss, gauss = states.rest["numpy"]
    words = states.tensors["numpy"]
    normals = [gauss, *(x for x in states.rest["python"][1:2] if x is not None)]
    has_words = words.dtype == torch.int64 and words.shape == (MT19937_WORDS,)
    if not has_words or not 0 <= words.min() <= words.max() < 2**32:
        raise ValueError(f"the state of numpy's generator is not {MT19937_WORDS} words of 32 bits")
    if type(position) is not int or not 0 <= position <= MT19937_WORDS:
        raise ValueError(f"the position of numpy's generator is not an integer from 0 to {MT19937_WORDS}")
    if has_gauss not in (0, 1) or not all(map(isfinite, normals)):
        raise ValueError("a normal number in the states of the generators is not finite")


def rng_snapshot(world: World) -> Callable[[], None]:
    """Takes the current states and returns a function that restores them."""
    return partial(set_rng, get_rng(world), world)
