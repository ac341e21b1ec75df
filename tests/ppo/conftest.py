"""Simulates ranks as threads, without a process group; collectives wait for all threads."""

import threading
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.errors import UserError
from ppo_ds.models.tiny import character_tokenizer
from tests.ppo.algo_cases import make_experience
from tests.support.threads import run_threads


class ThreadWorld:
    """Implements the interface of engine.world.World.

    A rank that calls fewer collectives than the others breaks the barrier.
    """

    device = torch.device("cpu")
    waiting = SimpleNamespace(take=lambda: 0.0)
    threads = SimpleNamespace(ranks=1)
    sequence, sequence_ranks, sequence_argument = None, 1, {}

    def __init__(self, rank, size, barrier, shares, nodes=1):
        self.rank, self.size, self.local_rank = rank, size, rank % (size // nodes)
        self.data_rank, self.data_size = rank, size
        self.is_main, self.is_first_on_node = rank == 0, self.local_rank == 0
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

    sum_of_shares = sum

    def max(self, x):
        return torch.stack(self._tensors(x)).amax(0)

    def max_int(self, n):
        return max(self.gather_objects(n))

    def concat(self, x):
        return torch.cat(self._tensors(x))

    def barrier(self):
        self.gather_objects(None)

    def on_all(self, action):
        result, problems = None, []
        try:
            result = action()
        except UserError as error:
            problems = error.problems
        for found in self.gather_objects(problems):
            if found:
                raise UserError(*found)
        return result

    def on_first_of_node(self, action):
        first = self.is_first_on_node
        result = self.on_all(action if first else lambda: None)
        return self.on_all((lambda: result) if first else action)


def run_ranks(size, work, nodes=1):
    """Runs work(world) on each rank and returns the results."""
    barrier, shares = threading.Barrier(size, timeout=300), [None] * size
    return run_threads(size, lambda rank: work(ThreadWorld(rank, size, barrier, shares, nodes)), barrier)


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
