"""Compiles device.cpp and loads it into this process. Does not import torch, which must come later."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
# pytest's own cache, which git ignores
CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "gpu_sim"


def missing() -> str | None:
    """Returns why the stub cannot be built on this machine, or None if it can."""
    if sys.platform != "linux":
        return "the simulated GPU needs Linux"
    return None if shutil.which("g++") else "the simulated GPU needs g++"


def torch_folder() -> Path:
    """Returns the folder of the torch package without importing it."""
    return Path(find_spec("torch").origin).parent


def built() -> Path:
    """Compiles the stub, once for each version of torch and of device.cpp, and returns the library."""
    folder = torch_folder()
    key = SOURCE.read_bytes() + (folder / "version.py").read_bytes() + str(folder).encode()
    library = CACHE / f"device_{hashlib.sha256(key).hexdigest()[:16]}.so"
    if library.exists():
        return library
    CACHE.mkdir(parents=True, exist_ok=True)
    include, draft = folder / "include", library.with_suffix(f".{os.getpid()}")
    includes = [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    # -O0, because the compiler's time counts and the stub's does not
    command = ["g++", "-shared", "-fPIC", "-O0", "-std=c++20", *includes, str(SOURCE), "-o", str(draft)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"g++ failed on {SOURCE}:\n{found.stderr[-4000:]}"
    os.replace(draft, library)  # another process may build the same file
    return library


def load() -> None:
    """Loads the libraries of torch that the stub needs, and the stub."""
    assert "torch" not in sys.modules, "the stub must be loaded before torch is imported"
    libraries = torch_folder() / "lib"
    for library in (libraries / "libc10.so", libraries / "libtorch_cpu.so", built()):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
