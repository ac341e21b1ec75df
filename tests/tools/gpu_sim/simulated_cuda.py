"""Simulates a CUDA device that computes nothing: shapes, dtypes and devices only, on the CPU build of torch.

CPU tensors stay real. Import this module before torch. ``with fake_cuda() as mode:`` records

    mode.bad      tensors of two devices in one operation, and waits or uploads inside a graph capture
    mode.syncs    waits of the host for the device
    mode.uploads  copies from the host to the device
    mode.ops      operations on the device

Kernels, streams, the allocator, NCCL, numerics and the DeepSpeed engine are not simulated. The stub of the
device is compiled from guard.cpp, which is in the folder that the environment variable GPU_SIM names (by
default ../shared/gpu_sim, seen from the repository). If guard.cpp or g++ is missing, a script that imports
this module prints the reason and exits.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(os.environ.get("GPU_SIM", ROOT.parent / "shared" / "gpu_sim")) / "guard.cpp"
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
sys.path.insert(0, str(ROOT))
SIZES = dict(  # sizes of the tiny models that the scripts run
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)


def load_stub() -> None:
    """Compiles the stub once per version of torch and loads it."""
    torch_folder = next(Path(d) / "torch" for d in sys.path if (Path(d) / "torch" / "lib").is_dir())
    compiler = shutil.which("g++")
    if not SOURCE.exists() or compiler is None:
        print(f"skipped: {'no ' + str(SOURCE) if not SOURCE.exists() else 'no g++'}")
        sys.exit(0)
    stub = (
        Path(tempfile.gettempdir())
        / f"ppo_ds_gpu_sim_{os.getuid()}_{zlib.crc32(str(torch_folder).encode())}.so"
    )
    built_from = [SOURCE, torch_folder / "version.py"]
    if not stub.exists() or stub.stat().st_mtime < max(file.stat().st_mtime for file in built_from):
        include = torch_folder / "include"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-std=c++20", "-I", include]
            + ["-I", include / "torch" / "csrc" / "api" / "include", SOURCE, "-o", stub],
            check=True,
        )
    libraries = [torch_folder / "lib" / name for name in ("libc10.so", "libtorch_cpu.so")]
    for library in (*libraries, stub):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


load_stub()

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
torch.cuda._lazy_init = lambda: None
torch.set_num_threads(1)
aten = torch.ops.aten


def where() -> str:
    """Returns the innermost line on the stack that is in ppo_ds, transformers or a script of this folder."""
    for frame in reversed(traceback.extract_stack()):
        name = os.path.basename(frame.filename)
        ours = any(part in frame.filename for part in ("/ppo_ds/", "/transformers/")) or name.startswith(
            "run_"
        )
        if ours and frame.filename != __file__:
            return f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno} {(frame.line or '')[:90]}"
    return "?"


class FakeCuda(TorchDispatchMode):
    """Simulates the device. The host reads ``answer(shape, dtype)`` from it, or zeros without ``answer``."""

    def __init__(self, answer=None):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.syncs, self.uploads, self.ops = (
            collections.Counter(),
            collections.Counter(),
            collections.Counter(),
        )
        self.capturing = False
        self.bad = []
        self.answer = answer or (lambda shape, dtype: torch.zeros(shape, dtype=dtype))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on = [x for x in leaves if isinstance(x, FakeTensor) and x.device.type == "cuda"]
        dev = kwargs.get("device")
        dev = torch.device(dev) if dev is not None else None
        name = str(func)
        if on and func is aten._local_scalar_dense.default:
            return self._sync("item", on[0])
        if on and func in (aten.allclose.default, aten.equal.default):
            self._note(self.syncs, name, on[0])
            return True
        if on and func in (aten.nonzero.default, aten.masked_select.default):
            self._sync(name, on[0])
        if on and func is aten._to_copy.default and dev is not None and dev.type == "cpu":
            self._note(self.syncs, "D2H", on[0])
            return self.answer(tuple(on[0].shape), kwargs.get("dtype") or on[0].dtype)
        if not on and not (dev is not None and dev.type == "cuda"):
            return func(*args, **kwargs)
        if not on and leaves and func in (aten._to_copy.default, aten._pin_memory.default):
            self._note(self.uploads, "H2D" + ("" if kwargs.get("non_blocking") else " blocking"), leaves[0])
        if func is aten.copy_.default:
            d, s = args[0], args[1]
            if d.device.type != "cuda":
                self._note(self.syncs, "copy_ D2H", s)
                d.copy_(self.answer(tuple(s.shape), d.dtype))
                return d
            if not isinstance(s, FakeTensor) or s.device.type == "cpu":
                self._note(self.uploads, "copy_ H2D", s)
        self.ops[name] += 1
        # An operation on simulated tensors must not have real CPU tensors with dimensions among its inputs.
        if on and func not in (aten.copy_.default,):
            cpu = [x for x in leaves if x.device.type == "cpu" and x.dim() > 0]
            zero = [x for x in leaves if x.device.type == "cpu" and x.dim() == 0]
            if cpu:
                self.bad.append((name, where()))
            if zero and self.capturing:
                self._note(self.uploads, f"cpu scalar into {name}", zero[0])
        with self.fake:
            return func(*args, **kwargs)

    def clear(self):
        for record in (self.syncs, self.uploads, self.ops, self.bad):
            record.clear()

    def _note(self, counter, kind, x):
        w = where()
        counter[f"{kind} {tuple(x.shape)} {w}"] += 1
        if self.capturing:
            self.bad.append((f"IN CAPTURE: {kind}", w))

    def _sync(self, kind, x):
        self._note(self.syncs, kind, x)
        return 0 if not x.dtype.is_floating_point else 0.0


@contextlib.contextmanager
def fake_cuda(answer=None):
    """Simulates the device inside the block."""
    mode = FakeCuda(answer)
    pin, make = torch.Tensor.pin_memory, torch.tensor

    def tensor(data, *, device=None, **k):
        t = make(data, **k)
        return t if device is None or torch.device(device).type == "cpu" else t.to(device)

    torch.tensor = tensor
    torch.Tensor.pin_memory = lambda self, *a, **k: self
    try:
        with mode:
            yield mode
    finally:
        torch.Tensor.pin_memory, torch.tensor = pin, make


failed: list[str] = []  # the failed cases, which ``reported`` adds


@contextlib.contextmanager
def reported(case: str) -> Iterator[None]:
    """Prints the error of a case and adds the case to ``failed``, so that the script can continue."""
    try:
        yield
    except Exception as error:
        failed.append(case)
        places = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        print(case, "FAILED", type(error).__name__, str(error)[:300], places[-8:])


def show(mode):
    for name, lines in (("syncs", mode.syncs), ("uploads", mode.uploads)):
        print(f"  {name}:")
        for line, count in lines.most_common(25):
            print("    ", count, line)
    print("  bad:")
    for line in dict.fromkeys(mode.bad):
        print("    ", line)
