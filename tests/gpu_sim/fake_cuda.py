"""Simulates a CUDA device on the CPU build of torch: it computes shapes, dtypes and devices, but no values.

Importing this module loads the stub of device.cpp, and therefore must happen before torch is imported.
Inside ``fake_cuda()`` tensors on "cuda" are fake tensors, whereas tensors on the CPU stay real. The device
records in a Report which operations mix devices, when the host waits for the device, which uploads block, and
what of this happens inside a graph capture.

Kernels, streams, the memory allocator, NCCL, numerics and DeepSpeed's engines are not simulated: drives use
stubs with the interface of ``TrainedModel``. Waits inside the launch code of a kernel are recorded only for
the operations that are listed below. The host reads zeros from the device, and True for flags, unless
``answer`` is set. Numbers that the host has uploaded are read back unchanged.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu_sim import stub
from tests.gpu_sim.report import Report

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
stub.load()

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
# Operations for which the host reads a number from the device: the size of their result or their result.
READS = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.equal.default,
    aten.allclose.default,
}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
# Operations that launch no kernel, besides those that return views.
WITHOUT_KERNEL = {
    aten._local_scalar_dense.default,
    aten._reshape_alias.default,
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
}
# folders with the code whose lines a report names
SOURCES = (
    *(str(Path(find_spec(name).origin).parent) + os.sep for name in ("ppo_ds", "transformers")),
    str(Path(__file__).parent / "drives") + os.sep,
)
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
torch.set_num_threads(1)


def place() -> str:
    """Returns the innermost line on the stack in ppo_ds, transformers or a drive.

    The stack of the backward pass has no such line, except where activations are recomputed.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(SOURCES):
            line = linecache.getline(file, frame.f_lineno).strip()
            return f"{'/'.join(Path(file).parts[-3:])}:{frame.f_lineno} {line[:80]}"
        frame = frame.f_back
    return "the backward pass"


def tensors_in(args: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among the arguments of an operation and in its lists."""
    for argument in args:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from (item for item in argument if isinstance(item, Tensor))


class FakeCuda(TorchDispatchMode):
    """The simulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.report = Report()
        self.capturing = False  # whether a CUDA graph is being captured
        # maps a computed tensor to what the host reads: a CPU tensor of the same shape and dtype
        self.answer: Callable[[Tensor], Tensor] = zeros_or_true
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = list(tensors_in((*args, *kwargs.values())))
        on_device = any(tensor.is_cuda for tensor in tensors)
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if not on_device and target != "cuda":
            return func(*args, **kwargs)
        self.report.operations[str(func)] += 1
        if func.namespace == "aten" and not func.is_view and func not in WITHOUT_KERNEL:
            self.report.kernels[str(func)] += 1
        if func is aten._local_scalar_dense.default:
            self.note_wait("a number is read")
            return self.numbers(args[0]).item()
        if func is aten._to_copy.default and target == "cpu":
            return self.to_host(args[0], kwargs)
        if func is aten.copy_.default:
            return self.copy(*args, **kwargs)
        if func in READS:
            return self.read(func, args)
        if func in INDEXED:
            args = (args[0], self.without_masks(func, args), *args[2:])
        if func is aten._to_copy.default and not on_device:
            return self.upload(func, *args, **kwargs)
        if on_device and any(is_foreign(tensor) for tensor in tensors):
            self.note_mix(func, tensors)
            args, kwargs = tree_map_only(Tensor, self.on_device, (args, kwargs))
        if "generator" in kwargs:  # the generators of the stub belong to the CPU
            kwargs["generator"] = None
        return self.run(func, *args, **kwargs)

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes shape, dtype and device of the results."""
        with self._fake:
            return func(*args, **kwargs)

    # -- records -------------------------------------------------------------------------------

    def note(self, counter: Counter[str], what: str) -> None:
        counter[f"{what} at {place()}"] += 1

    def note_wait(self, what: str) -> None:
        self.note(self.report.in_capture if self.capturing else self.report.waits, what)

    def note_upload(self, source: Tensor, non_blocking: bool) -> None:
        """Records a copy of a CPU tensor to the device.

        It is asynchronous only from pinned memory. Inside a capture it is forbidden in any case: a replay
        would read the host's memory again, which belongs to other tensors by then.
        """
        if source.numel() == 0:  # nothing is copied
            return
        what = f"an upload of {list(source.shape)}"
        if self.capturing:
            self.note(self.report.in_capture, what)
        elif non_blocking and source.is_pinned():
            self.note(self.report.pinned_uploads, what)
        else:
            self.note(self.report.blocking_uploads, what + ("" if non_blocking else " that waits"))

    def note_mix(self, func: Any, tensors: list[Tensor]) -> None:
        """Records an operation with CPU tensors among its operands, and those that are on the device."""
        shapes = ", ".join(f"{list(tensor.shape)} on {tensor.device.type}" for tensor in tensors)
        self.note(self.report.mixed, f"{func} of {shapes}")

    # -- copies and reads -------------------------------------------------------------------------------

    def on_device(self, tensor: Tensor) -> Tensor:
        """Copies a foreign tensor to the device, so that the drive continues and finds later mistakes too."""
        return self.run(aten._to_copy.default, tensor, device=CUDA) if is_foreign(tensor) else tensor

    def upload(self, func: Any, source: Tensor, **options: Any) -> Tensor:
        """Copies a CPU tensor to the device, which keeps the numbers so that they can be read back."""
        self.note_upload(source, options.get("non_blocking", False))
        made = self.run(func, source, **options)
        made.uploaded = source.clone(), made._version
        return made

    def numbers(self, source: Tensor) -> Tensor:
        """Returns what the host reads from a tensor on the device."""
        content, version = getattr(source, "uploaded", (None, None))
        return self.answer(source) if content is None or version != source._version else content.clone()

    def to_host(self, source: Tensor, options: dict[str, Any]) -> Tensor:
        """Copies to the CPU; torch copies to new pinned memory if the copy is asynchronous."""
        if options.get("non_blocking"):
            self.note(self.report.in_capture if self.capturing else self.report.downloads, "a download")
        elif source.numel():
            self.note_wait(f"a copy of {list(source.shape)} to the host")
        return self.numbers(source).to(options.get("dtype") or source.dtype)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copies between existing tensors, of which at least one is on the device."""
        if not target.is_cuda:
            if non_blocking and target.is_pinned():
                self.note(self.report.in_capture if self.capturing else self.report.downloads, "a download")
            elif source.numel():
                self.note_wait(f"a copy of {list(source.shape)} to the host")
            return target.copy_(self.numbers(source))
        if not source.is_cuda:
            self.note_upload(source, non_blocking)
        return self.run(aten.copy_.default, target, source, non_blocking)

    def read(self, func: Any, args: Any) -> Any:
        """Runs an operation that waits for a number on the device.

        Masks count as all True, and all numbers as different.
        """
        self.note_wait(f"{func}")
        if func in (aten.equal.default, aten.allclose.default):
            return True
        if func is aten.nonzero.default:
            return self.run(
                aten.new_empty.default, args[0], [args[0].numel(), args[0].dim()], dtype=torch.long
            )
        if func is aten.masked_select.default:
            return self.run(aten.new_empty.default, args[0], [args[0].numel()])
        if func is aten._unique2.default:
            every = [args[0].numel()]
            inverse = self.run(aten.new_empty.default, args[0], args[0].shape, dtype=torch.long)
            counts = self.run(aten.new_empty.default, args[0], every, dtype=torch.long)
            return self.run(aten.new_empty.default, args[0], every), inverse, counts
        raise NotImplementedError(f"the size of the result of {func} depends on the device's data")

    def without_masks(self, func: Any, args: Any) -> list[Tensor | None]:
        """Replaces masks among the indices by the indices of all elements, for which the device is read.

        A scalar is written to the elements of a mask without their indices.
        """
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or not index.is_cuda or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            if func is aten.index.Tensor or args[2].numel() != 1:
                self.note_wait("indexing by a mask")
            elements = [index.numel()]
            indices += [
                self.run(aten.new_empty.default, index, elements, dtype=torch.long)
                for _ in range(index.dim())
            ]
        return indices


def is_foreign(tensor: Tensor) -> bool:
    """Returns whether the device cannot take this operand. It takes CPU scalars: torch passes the value."""
    return not tensor.is_cuda and tensor.dim() > 0


def zeros_or_true(source: Tensor) -> Tensor:
    return torch.full(source.shape, source.dtype == torch.bool, dtype=source.dtype)


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, device: FakeCuda, *args: Any, **kwargs: Any):
        self._device = device

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.note_wait("a wait for an event")

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Stream(Event):
    """Stands in for torch.cuda.Stream."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event(self._device)


@contextmanager
def fake_cuda(device: FakeCuda | None = None) -> Iterator[FakeCuda]:
    """Simulates the device inside the block, by default a new one."""
    device = device or FakeCuda()
    replaced = {
        "_lazy_init": lambda: None,
        "synchronize": lambda device_index=None: device.note_wait("torch.cuda.synchronize"),
        "Event": lambda *args, **kwargs: Event(device),
        "Stream": lambda *args, **kwargs: Stream(device),
        "current_stream": lambda device_index=None: Stream(device),
        "stream": lambda stream: nullcontext(),
        "set_stream": lambda stream: None,
        "get_device_capability": lambda device_index=None: (9, 0),
        "get_rng_state": lambda device_index=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device_index=None: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
    # torch.tensor(..., device="cuda") then makes a CPU tensor and copies it, so that the copy is seen
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with (
            mock.patch.multiple(torch.cuda, **replaced),
            mock.patch.object(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),
            device,
        ):
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)
