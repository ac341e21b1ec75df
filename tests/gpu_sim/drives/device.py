"""Makes mistakes on purpose, which the simulated device must record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ppo_ds.types import to_device
from tests.gpu_sim.cases import CAPTURED
from tests.gpu_sim.cases import CASES as NAMES
from tests.gpu_sim.fake_cuda import CUDA, FakeCuda


def numbers() -> Tensor:
    return torch.zeros(3, device=CUDA)


def write_to_mask() -> None:
    x = numbers()
    x[x > 0] = torch.zeros(3, device=CUDA)


def write_scalar_to_mask() -> None:
    x = numbers()
    x[x > 0] = 1.0


def download_to_pinned_memory() -> None:
    torch.zeros(3, pin_memory=True).copy_(numbers(), non_blocking=True)


def upload_and_read() -> None:
    assert to_device(torch.tensor([3, 1, 2]), CUDA).tolist() == [3, 1, 2]


def add_scalar_of_the_host() -> None:
    numbers() + torch.tensor(2.0)


ACTIONS: dict[str, Callable[[], object]] = {
    "item": lambda: numbers().sum().item(),
    "tolist": lambda: numbers().tolist(),
    "truth value": lambda: bool((numbers() > 0).all()),
    "nonzero": lambda: numbers().nonzero(),
    "read by a mask": lambda: numbers()[numbers() > 0],
    "write to a mask": write_to_mask,
    "write a scalar to a mask": write_scalar_to_mask,
    "synchronize": lambda: torch.cuda.synchronize(),
    "event": lambda: torch.cuda.Event().synchronize(),
    "tensor from a list": lambda: torch.tensor([1.0, 2.0], device=CUDA),
    "new_tensor": lambda: numbers().new_tensor([1.0, 2.0]),
    "pageable upload": lambda: torch.zeros(3).to(CUDA),
    "pageable upload without blocking": lambda: torch.zeros(3).to(CUDA, non_blocking=True),
    "pageable copy_": lambda: numbers().copy_(torch.zeros(3)),
    "pinned upload": lambda: torch.zeros(3).pin_memory().to(CUDA, non_blocking=True),
    "pinned upload of an expanded tensor": lambda: to_device(torch.zeros(1).expand(3), CUDA),
    "pinned upload that blocks": lambda: torch.zeros(3).pin_memory().to(CUDA),
    "download to pinned memory": download_to_pinned_memory,
    "upload and read": upload_and_read,
    "CPU operand": lambda: numbers() + torch.ones(3),
    "CPU index": lambda: numbers()[torch.tensor([0, 1])],
    "CPU scalar": add_scalar_of_the_host,
}


def act(device: FakeCuda, name: str) -> None:
    device.capturing = name.endswith(CAPTURED)
    ACTIONS[name.removesuffix(CAPTURED)]()


CASES = {name: partial(act, name=name) for name in NAMES["device"]}
