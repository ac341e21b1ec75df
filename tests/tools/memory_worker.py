"""Trains two steps and writes the peak memory of each phase: `memory_worker.py FOLDER`. See test_doctor.py.

With MALLOC_MMAP_THRESHOLD_ set, the C library returns each large block to the system as soon as it is freed.
Therefore the memory of the process rises and falls with the memory of its tensors.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

folder = Path(sys.argv[1])

from launch.cli import load_config
from launch.process import prepare_environment
from ppo_ds.distributed.exit import exit_now

config = load_config(json.loads((folder / "arguments.json").read_text()))
prepare_environment(verbose=False)

from ppo_ds.assemble import ppo, reward_model, sft
from ppo_ds.assemble.run import build_run
from ppo_ds.distributed import world
from ppo_ds.run.timing import PhaseTimer

world.keep_freed_memory = lambda: False
trim = ctypes.CDLL("libc.so.6").malloc_trim
peaks: dict[str, int] = {}
before = 0


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def begin() -> None:
    """Resets the peak memory of the process."""
    gc.collect()
    trim(0)
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def measured(timer: PhaseTimer, phase: str) -> Iterator[None]:
    begin()
    with timed(timer, phase):
        yield
    peaks[phase] = max(peaks.get(phase, 0), kilobytes("VmHWM") - before)


def loaded(*args: Any, **kwargs: Any) -> Any:
    global before
    begin()
    before = kilobytes("VmRSS")
    return load_models(*args, **kwargs)


timed, PhaseTimer.__call__ = PhaseTimer.__call__, measured
build, name = {
    "ppo": (ppo, "load_models"),
    "sft": (sft, "build_actor"),
    "reward_model": (reward_model, "build_scorer"),
}[config.stage]
load_models = getattr(build, name)
setattr(build, name, loaded)
build_run(config).fit()
(folder / "peaks.json").write_text(json.dumps({phase: 1024 * peak for phase, peak in peaks.items()}))
exit_now(0)
