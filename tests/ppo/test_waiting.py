"""Tests that the number of synchronisations with the device does not grow with the number of micro-batches.

At each synchronisation the GPU runs out of queued kernels and idles. In these tests, model outputs and
tensors that are moved to the device record each time the host reads their values.
"""

from dataclasses import replace

import pytest
import torch

from ppo_ds.types import Sequences
from tests.ppo.algo_cases import Stub, answers, maker, without
from tests.ppo.learner_cases import ANSWERS, PROMPTS, Engine, TinyCritic, TinyPolicy, V, learner, old_around

READS = [
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
]


class OnDevice(torch.Tensor):
    reads: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # indexing with a mask reads how many of its elements are True
        by_mask = (
            func is torch.Tensor.__getitem__
            and isinstance(args[1], torch.Tensor)
            and args[1].dtype == torch.bool
        )
        if func in READS or func in (torch.nonzero, torch.masked_select) or by_mask:
            cls.reads.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(out):
    if isinstance(out, torch.Tensor):
        return out.as_subclass(OnDevice)
    return type(out)(*(column if column is None else on_device(column) for column in out))


class DeviceEngine(Engine):
    def __call__(self, *args, **kwargs):
        return on_device(super().__call__(*args, **kwargs))


class DeviceStub(Stub):
    def __call__(self, *args):
        return on_device(super().__call__(*args))


@pytest.fixture
def reads(monkeypatch):
    """Returns the reads since the last call."""
    plain = Sequences.to

    def to(self, device):
        moved = plain(self, device)
        columns = {name: column for name, column in vars(moved).items() if isinstance(column, torch.Tensor)}
        return replace(moved, **{name: column.as_subclass(OnDevice) for name, column in columns.items()})

    monkeypatch.setattr(Sequences, "to", to)

    def take():
        found, OnDevice.reads = OnDevice.reads, []
        return sorted(found)

    take()
    return take


OBJECTIVE = dict(entropy_coef=0.1, kl_in_loss=True, aux_coef=0.3, dual_clip=3.0)


@pytest.mark.parametrize("once", [True, False])
def test_host_reads_of_an_update(world, experience, reads, once):
    rows = old_around(experience(PROMPTS, ANSWERS))
    rows = without(rows, "logprobs", "old_logprobs") if once else rows
    found = {}
    for budget in (10_000, 24, 1):
        actor, critic = DeviceEngine(TinyPolicy(V, 1), world), DeviceEngine(TinyCritic(1, 2), world)
        learn = learner(
            world,
            actor,
            critic,
            policy=OBJECTIVE,
            budget=budget,
            minibatch_size=8,
            epochs=1 if once else 2,
            target_kl=1e9,
        )
        learn(rows, 0.7, 3)
        found[actor.backwards[0]] = reads()
    assert min(found) == 1 and max(found) == 8 and len(found) == 3
    assert found[1] and all(again == found[1] for again in found.values())


def test_host_reads_of_an_experience(world, reads):
    rollout, found = answers([1, 2, 3, 4], [0.5, 1.0, 2.0, 3.0]), {}
    for budget in (1000, 1):
        actor, reference, critic = DeviceStub(), DeviceStub(shift=2.0), DeviceStub(value=True)
        maker(world, actor=actor, reference=reference, critic=critic, token_budget=budget)(rollout, 0.5)
        found[actor.forwards] = reads()
    # one read each for actor, reference and critic
    assert found.keys() == {1, 4} and found[1] == found[4] == ["cpu"] * 3
