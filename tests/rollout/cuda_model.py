"""Models CUDA graphs and the private pools of torch's caching allocator, on the CPU.

``Device.install`` replaces the parts of torch.cuda that the graph code calls. A capture records the
operations of the step instead of running them, and a replay runs them on the same memory, so that everything
that a step reads from Python (shapes, tensors whose storage was replaced) is as fixed as on a GPU. The rules,
by their place in torch's sources:

    c10/cuda/CUDACachingAllocator.cpp
        create_or_incref_pool        a pool is created with use count 1; a later capture needs a use count > 0
        beginAllocateToPool          counts the pool, then refuses a pool that is being recorded into
        endAllocateToPool            refuses a pool that is not being recorded into
        releasePool                  a pool becomes freeable with use count 0
        release_cached_blocks        (empty_cache) asserts that no capture is under way, and erases freeable
                                     pools without live blocks
        malloc                       does not free cached blocks while a capture is under way
    aten/src/ATen/cuda/CUDAGraph.cpp
        capture_begin                needs a stream other than the default one
        capture_end                  2.11 and 2.12: an invalid capture raises before endAllocateToPool;
                                     from 2.13: after it (pull request 180395)
        reset, called when the graph is deleted
                                     2.11 to 2.13: releases the pool only if the capture ended without an
                                     error; later: always (pull request 190348)
    aten/src/ATen/cuda/CublasHandlePool.cpp
                                     a library allocates a workspace at its first use on a stream and keeps it

Kernels, time, streams that run at the same time and the sizes of blocks are not modelled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
HOST_READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


class InternalAssert(RuntimeError):
    """A failed TORCH_INTERNAL_ASSERT."""


class Fault(Enum):
    """Kinds of failures of a capture."""

    HOST_READ = auto()  # an operation that is not permitted, which also invalidates the capture
    CODE = auto()  # an error of the step that does not invalidate the capture
    FULL = auto()  # no memory until cached blocks are freed
    NO_MEMORY = auto()  # no memory at all
    NO_MEMORY_INVALID = auto()  # the same, and the allocator's cudaFree invalidated the capture
    OTHER_THREAD = auto()  # invalidated by another thread; the end of the capture raises the error
    INSTANTIATE = auto()  # the graph cannot be instantiated
    OTHER_CLASS = auto()  # a KeyError of the step

    @property
    def invalidates(self) -> bool:
        return self in (Fault.HOST_READ, Fault.NO_MEMORY_INVALID, Fault.OTHER_THREAD)


NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
ERRORS = {  # of operations; a new error each time, because an error refers to the frames that it has passed
    Fault.HOST_READ: lambda: RuntimeError(NOT_PERMITTED),
    Fault.CODE: lambda: RuntimeError("an error of the model's code"),
    Fault.FULL: lambda: torch.OutOfMemoryError("CUDA out of memory."),
    Fault.NO_MEMORY: lambda: torch.OutOfMemoryError("CUDA out of memory."),
    Fault.NO_MEMORY_INVALID: lambda: torch.OutOfMemoryError("CUDA out of memory."),
    Fault.OTHER_CLASS: lambda: KeyError("an error of another class"),
}


@dataclass
class Pool:
    use_count: int = 1
    live_blocks: int = 0


@dataclass
class Allocator:
    """Private pools by their handles."""

    pools: dict[tuple[int, int], Pool] = field(default_factory=dict)
    captures_underway: list[tuple[int, int]] = field(default_factory=list)
    emptied: int = 0

    def begin_allocate_to_pool(self, handle: tuple[int, int]) -> None:
        if handle not in self.pools:
            self.pools[handle] = Pool()
        elif self.pools[handle].use_count > 0:
            self.pools[handle].use_count += 1
        else:
            raise InternalAssert("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        if handle in self.captures_underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.captures_underway.append(handle)

    def end_allocate_to_pool(self, handle: tuple[int, int]) -> None:
        if handle not in self.captures_underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captures_underway.remove(handle)

    def release_pool(self, handle: tuple[int, int]) -> None:
        self.pools[handle].use_count -= 1
        if self.pools[handle].use_count < 0:
            raise InternalAssert("uc >= 0 INTERNAL ASSERT FAILED")

    def empty_cache(self) -> None:
        if self.captures_underway:
            raise InternalAssert("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.emptied += 1
        self.pools = {
            handle: pool for handle, pool in self.pools.items() if pool.use_count or pool.live_blocks
        }


@dataclass(eq=False)
class Stream:
    """A stream; eq=False because streams are compared by identity."""

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class Block:
    """Memory of a private pool, live as long as a tensor of the step refers to it."""

    def __init__(self, pool: Pool):
        self.pool, self.tensors = pool, 0
        pool.live_blocks += 1

    def hold(self, tensor: torch.Tensor) -> None:
        self.tensors += 1
        weakref.finalize(tensor, self.drop).atexit = False

    def drop(self) -> None:
        self.tensors -= 1
        self.pool.live_blocks -= self.tensors == 0


class Device:
    """A CUDA device with the rules of a version of torch.

    ``faults`` maps the number of a capture to what goes wrong in it and at which operation.
    """

    def __init__(self, version: tuple[int, int], faults: dict[int, tuple[Fault, int]] | None = None):
        self.version, self.faults = version, faults or {}
        self.allocator = Allocator()
        self.default = self.current = Stream()
        self.workspaces: set[Stream] = set()  # streams on which libraries have been used
        self.handles = self.captures = self.replays = self.operations = 0
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def install(self, monkeypatch) -> None:
        """Replaces the parts of torch.cuda that record graphs."""
        for name, value in {
            "CUDAGraph": lambda: Graph(self),
            "Stream": lambda device: Stream(),
            "graph_pool_handle": self.graph_pool_handle,
            "current_stream": lambda: self.current,
            "stream": self.stream,
            "empty_cache": self.allocator.empty_cache,
            "graph": None,  # its synchronisation and empty_cache would cost more than a capture
            "synchronize": None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def graph_pool_handle(self) -> tuple[int, int]:
        self.handles += 1
        return (0, self.handles)

    @contextmanager
    def stream(self, stream: Stream):
        """Makes the stream current. Libraries are used on it, in the warm-up step too."""
        before, self.current = self.current, stream
        try:
            with Products(self):
                yield
        finally:
            self.current = before

    @property
    def use_counts(self) -> list[int]:
        return [pool.use_count for pool in self.allocator.pools.values() if pool.use_count]


class Products(TorchDispatchMode):
    """Records the streams on which libraries have allocated their workspaces."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.device.workspaces.add(self.device.current)
        return func(*args, **(kwargs or {}))


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, device: Device):
        self.device = device
        self.handle: tuple[int, int] | None = None
        self.capture_ended = self.has_graph_exec = self.invalid = False
        device.graphs.add(self)

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        if self.device.current is self.device.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.stream = self.device.current
        self.device.allocator.begin_allocate_to_pool(pool)
        self.handle, self.pool = pool, self.device.allocator.pools[pool]
        fault, operation = self.device.faults.get(self.device.captures, (None, 0))
        self.fault = None if fault is Fault.FULL and self.device.allocator.emptied else fault
        self.recording = Recording(self, operation)
        self.device.captures += 1
        self.recording.__enter__()

    def capture_end(self) -> None:
        if self.device.current is not self.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self.recording.__exit__(None, None, None)
        self.operations = self.recording.finish()
        self.fresh = self.recording.fresh
        del self.recording
        invalid = self.invalid or self.fault is Fault.OTHER_THREAD
        if self.device.version >= (2, 13):
            self.device.allocator.end_allocate_to_pool(self.handle)
        if invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if self.device.version < (2, 13):
            self.device.allocator.end_allocate_to_pool(self.handle)
        self.capture_ended = True
        if self.fault is Fault.INSTANTIATE:
            raise RuntimeError("CUDA error: out of memory")
        self.has_graph_exec = True

    def replay(self) -> None:
        assert self.has_graph_exec, "Called CUDAGraph::replay without a preceding successful capture."
        assert self.pool.use_count > 0
        self.device.replays += 1
        with torch.no_grad():
            for func, args, kwargs, out in self.operations:
                for recorded, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(new, torch.Tensor) and recorded.data_ptr() != new.data_ptr():
                        recorded.copy_(new)
        self.overwrite()

    def overwrite(self) -> None:
        """Overwrites the memory in the pool, as the next graph of the pool may."""
        for tensor in self.fresh:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**40) * (tensor.dtype == torch.long))

    def __del__(self) -> None:
        if self.handle is None:
            return
        if self.capture_ended or self.device.version >= (2, 14):
            self.device.allocator.release_pool(self.handle)


class Recording(TorchDispatchMode):
    """Records operations; ``finish`` undoes what they have written."""

    def __init__(self, graph: Graph, fails_at: int):
        super().__init__()
        self.graph, self.fails_at = graph, fails_at
        self.operations: list[tuple[Callable, tuple, dict, object]] = []
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.blocks: dict[int, Block] = {}  # by address
        self.fresh: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.check(func)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.overwritten.append((alias(value), value.clone()))
        out = func(*args, **kwargs)
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        for tensor in tensors(out):
            address = tensor.untyped_storage().data_ptr()
            if address not in given and address not in self.blocks:
                self.blocks[address] = Block(self.graph.pool)
                self.fresh.append(alias(tensor))
            if address in self.blocks and not any(tensor is x for x in tensors((args, kwargs))):
                self.blocks[address].hold(tensor)
        self.operations.append((func, *(tree_map(alias, x) for x in (args, kwargs, out))))
        return out

    def check(self, func: Callable) -> None:
        """Raises the error of the operation, if it has one; counts workspaces in the pool."""
        device = self.graph.device
        if func in HOST_READS:
            self.graph.fault = Fault.HOST_READ
        elif self.graph.fault not in ERRORS or len(self.operations) < self.fails_at:
            if func in PRODUCTS and device.current not in device.workspaces:
                device.workspaces.add(device.current)
                self.graph.pool.live_blocks += 1
            return
        self.graph.invalid = self.graph.fault.invalidates
        raise ERRORS[self.graph.fault]()

    def finish(self) -> list[tuple[Callable, tuple, dict, object]]:
        for tensor, before in reversed(self.overwritten):
            tensor.copy_(before)
        self.graph.device.operations = len(self.operations)
        self.graph.fresh = self.fresh
        self.graph.overwrite()
        return self.operations


def alias(x):
    """Returns another tensor on the same memory, so that the recording keeps no tensor of the step alive."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel() > 0]
