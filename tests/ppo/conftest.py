"""Simulates ranks as threads, without a process group; collectives wait for all threads."""

import threading
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.models.tiny import character_tokenizer
from tests.ppo.algo_cases import make_experience
from tests.support.threads import run_threads


class ThreadWorld:
    """Implements the interface of engine.world.World.

    A rank that calls fewer collectives than the others breaks the barrier.
    """

    device = torch.device("cpu")
    waiting = SimpleNamespace(take=lambda: 0.0)

    def __init__(self, rank, size, barrier, shares):
        self.rank, self.size, self.local_rank = rank, size, rank
        self.is_main = rank == 0
        self._barrier, self._shares = barrier, shares

    def gather_objects(self, item):
        self._shares[self.rank] = item
        self._barrier.wait()
        items = list(self._shares)
        self._barrier.wait()
        return items

    def _tensors(self, x):
        parts = self.gather_objects(x.detach().clone())
        assert {(tuple(part.shape), part.dtype) for part in parts} == {(tuple(x.shape), x.dtype)}, (
            "collectives want one shape and dtype"
        )
        return parts

    def sum(self, x):
        return torch.stack(self._tensors(x)).sum(0)

    def max(self, x):
        return torch.stack(self._tensors(x)).amax(0)

    def max_int(self, n):
        return max(self.gather_objects(n))

    def concat(self, x):
        return torch.cat(self._tensors(x))

    def barrier(self):
        self.gather_objects(None)


def run_ranks(size, work):
    """Runs work(world) on each rank and returns the results."""
    barrier, shares = threading.Barrier(size, timeout=300), [None] * size
    return run_threads(size, lambda rank: work(ThreadWorld(rank, size, barrier, shares)), barrier)


@pytest.fixture
def on_ranks():
    return run_ranks


@pytest.fixture
def world():
    return ThreadWorld(0, 1, threading.Barrier(1), [None])


@pytest.fixture
def experience():
    return make_experience


@pytest.fixture
def tokenizer():
    """Makes a tokenizer of <pad> 0, <eos> 1, <unk> 2, then a, b, c, ..."""
    return character_tokenizer("abcdefghi")
