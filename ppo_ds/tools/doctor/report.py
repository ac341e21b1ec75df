"""Checks the machine and the inputs of a run before it starts, without reading weights."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from ppo_ds.build.data import (
    Inputs,
    build_held_out,
    build_prompts,
    build_ptx,
    build_tokenizer,
    describe_rows,
    stop_ids,
)
from ppo_ds.build.preflight import preflight
from ppo_ds.config.schema import Config
from ppo_ds.config.targets import bind
from ppo_ds.data.prompts import PromptStream
from ppo_ds.engine.memory_budget import GIB, format_bytes
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.tools.doctor.estimate import BYTES, Models

T = TypeVar("T")
STATE_BYTES = 12  # bytes per trained parameter in a checkpoint: an fp32 weight and two moments
MIN_SHM = GIB  # NCCL and data loaders of several GPUs need more than the 64 MiB default of docker


@dataclass(frozen=True)
class Line:
    """The result of one check."""

    name: str
    text: str
    ok: bool = True

    def __str__(self) -> str:
        return f"{self.name:<10} {'' if self.ok else 'error: '}{self.text}"


class Report:
    """Collects the results of checks. An error in one check does not stop the others."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    @property
    def errors(self) -> int:
        return sum(not line.ok for line in self.lines)

    def add(self, name: str, text: str, ok: bool = True) -> None:
        self.lines.append(Line(name, text, ok))

    def attempt(
        self, name: str, action: Callable[[], T], describe: Callable[[T], str | None] = lambda _: "ok"
    ) -> T | None:
        """Runs ``action`` and returns its result, or None after a UserError, which is reported.

        ``describe`` returns the line for a result; no line is added if it returns None.
        """
        try:
            result = action()
        except UserError as error:
            self.lines += [Line(name, problem, ok=False) for problem in error.problems]
            return None
        if (text := describe(result)) is not None:
            self.add(name, text)
        return result


# -- the machine -------------------------------------------------------------------------------------------


def versions() -> str:
    parts = [
        f"python {platform.python_version()}",
        *(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers", "peft")),
    ]
    driver = Path("/proc/driver/nvidia/version")
    if torch.version.cuda:
        parts.append(f"CUDA {torch.version.cuda}")
    if driver.exists():
        parts.append(f"driver {driver.read_text().split('Kernel Module')[-1].split()[0]}")
    return ", ".join(parts)


def gpu_memory() -> list[int]:
    """Returns the memory of each GPU of this machine in bytes."""
    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]


def host_memory() -> int:
    """Returns the CPU memory of this machine in bytes."""
    return psutil.virtual_memory().total


def free_disk(config: Config) -> int:
    """Returns the free bytes on the disk of run.dir, which need not exist yet."""
    folder = Path(str(config.run.dir)).absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def check_disk(config: Config, models: Models, report: Report) -> None:
    """Checks the free space for all kept checkpoints, one more while it is written, and the final export."""
    actor, critic, ema = models.actor, models.critic, config.actor.ema.decay is not None
    trained = actor.trained + (critic.trained if critic else 0)
    copies = int(ema) + int(config.algo.old_policy == "lagged")
    checkpoint = STATE_BYTES * trained + 4 * copies * actor.trained
    settings = config.checkpoint
    kept = 0 if settings.every == 0 else settings.keep_last + 1 + settings.keep_best
    export = BYTES[config.actor.model.dtype] * actor.parameters * (1 + ema)
    export += BYTES[config.critic.model.dtype] * critic.parameters if critic else 0
    free = free_disk(config)
    needed = kept * checkpoint + export
    text = (
        f"run.dir={config.run.dir}: {format_bytes(needed)} needed ({kept} checkpoints of "
        f"{format_bytes(checkpoint)}, export of {format_bytes(export)}), {format_bytes(free)} free"
    )
    remedy = "" if needed <= free else "; choose another run.dir or lower checkpoint.keep_last"
    report.add("disk", text + remedy, ok=needed <= free)


def check_host(offloaded: int, per_node: int, on_gpu: bool, report: Report) -> None:
    """Checks shared memory, and reports the CPU memory for ``offloaded`` bytes per rank."""
    shm = Path("/dev/shm")
    if shm.exists():
        size = shutil.disk_usage(shm).total
        short = on_gpu and per_node > 1 and size < MIN_SHM
        remedy = "; several GPUs need at least 1 GiB: docker run --ipc=host" if short else ""
        report.add("/dev/shm", format_bytes(size) + remedy, ok=not short)
    if offloaded:
        report.add(
            "host",
            f"{format_bytes(offloaded)} per rank for offloading, {format_bytes(offloaded * per_node)} per "
            f"node; this machine has {format_bytes(host_memory())}",
        )


# -- the inputs --------------------------------------------------------------------------------------------


def check_inputs(config: Config, report: Report) -> tuple[Tokenizer | None, int | None]:
    """Checks tokenizer, data and reward.

    Returns the actor's tokenizer and the number of tokens of the longest prompt. Either is None if it could
    not be read.
    """
    tokenizer = report.attempt(
        "tokenizer", lambda: build_tokenizer(config), lambda t: f"{t.vocab_size} tokens"
    )
    if tokenizer is None:
        return None, None

    def describe_stops(ids: tuple[int, ...]) -> str:
        tokens = ", ".join(repr(tokenizer.decode([i], skip_special_tokens=False)) for i in ids)
        return f"responses end with {tokens or 'the length limit only'}"

    report.attempt("sampling", lambda: stop_ids(config, tokenizer), describe_stops)
    errors = report.errors
    source = report.attempt(
        "data",
        lambda: build_prompts(config, tokenizer),
        lambda s: f"{s.path}: {describe_rows(s.report, 'prompts')}; the longest has {s.longest} tokens",
    )
    held_out = report.attempt(
        "held out",
        lambda: build_held_out(config, tokenizer),
        lambda s: f"{s.path}: {describe_rows(s.report, 'prompts')}" if s else None,
    )
    ptx = report.attempt(
        "texts",
        lambda: build_ptx(config, tokenizer),
        lambda s: f"{s.source.path}: {describe_rows(s.source.report, 'texts')}" if s else None,
    )
    reward = report.attempt("reward", lambda: bind(config.reward, "reward"), lambda _: None)
    if source is None or reward is None or report.errors > errors:
        return tokenizer, source.longest if source else None
    rollout = config.rollout
    stream = report.attempt(
        "data",
        lambda: PromptStream(
            source, prompts_per_step=rollout.prompts_per_step, samples_per_prompt=rollout.samples_per_prompt
        ),
        lambda _: None,
    )
    if stream is not None:
        inputs = Inputs(tokenizer, source, held_out, stream, ptx)
        report.attempt("reward", lambda: preflight(config, inputs), lambda _: "ok (weights are not checked)")
    return tokenizer, max(s.longest for s in (source, held_out) if s is not None)
