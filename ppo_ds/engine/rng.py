"""The random states of one rank on disk: torch (CPU and its GPU), numpy, python. Safetensors, no pickles."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from ppo_ds.engine.files import sha256, write_tensors
from ppo_ds.engine.world import World


def rng_file(directory: Path, rank: int) -> Path:
    return directory / f"rng_rank_{rank:05d}.safetensors"


def save_rng(directory: Path, world: World) -> Path:
    """Not a collective: each rank writes its own file."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, gauss_next = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if world.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(world.device)
    rest = {"numpy": [int(position), int(has_gauss), float(gauss)], "python": [version, gauss_next]}
    path = rng_file(directory, world.rank)
    write_tensors(path, tensors, metadata={"rest": json.dumps(rest)})
    return path


def load_rng(directory: Path, world: World) -> bool:
    """Not a collective. False: the checkpoint had fewer ranks, and this one was seeded anew, from rank 0's state and its own number."""
    path = rng_file(directory, world.rank)
    if not path.exists():
        _seed_all(int(hashlib.sha256(f"{sha256(rng_file(directory, 0))} {world.rank}".encode()).hexdigest()[:8], 16))
        return False
    with safe_open(path, framework="pt") as file:
        rest = json.loads(file.metadata()["rest"])
        position, has_gauss, gauss = rest["numpy"]
        version, gauss_next = rest["python"]
        torch.set_rng_state(file.get_tensor("torch"))
        np.random.set_state(("MT19937", file.get_tensor("numpy").numpy().astype(np.uint32), position, has_gauss, gauss))
        random.setstate((version, tuple(file.get_tensor("python").tolist()), gauss_next))
        if world.device.type == "cuda" and "cuda" in file.keys():  # noqa: SIM118 (not a dict)
            torch.cuda.set_rng_state(file.get_tensor("cuda"), world.device)
    return True


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
