"""What a run needs of a machine and of its inputs, looked at before it starts: no weights are read."""

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
    counted,
    stop_ids,
)
from ppo_ds.build.preflight import preflight
from ppo_ds.config.schema import Config
from ppo_ds.config.targets import bind
from ppo_ds.data.prompts import PromptStream, Source
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.tools.doctor.estimate import BYTES, Models

T = TypeVar("T")
GIB = 2**30
CHECKPOINTED = 12  # bytes of each trained number: fp32 weight and two moments
SMALL_SHM = GIB  # NCCL and data loaders of several GPUs want more


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    name: str
    text: str
    ok: bool = True

    def __str__(self) -> str:
        return f"{self.name:<10} {'' if self.ok else 'error: '}{self.text}"


class Report:
    """Lines, gathered by trying one thing after the other: a mistake of the user's becomes a line, and the rest is looked at too."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def add(self, name: str, text: str, ok: bool = True) -> None:
        self.lines.append(Line(name, text, ok))

    def tried(
        self, name: str, action: Callable[[], T], said: Callable[[T], str | None] = lambda _: "ok"
    ) -> T | None:
        """What ``action`` returns; None where it raises a UserError. ``said``: of the result, the line's text; None: no line."""
        try:
            found = action()
        except UserError as error:
            self.lines += [Line(name, problem, ok=False) for problem in error.problems]
            return None
        if (text := said(found)) is not None:
            self.add(name, text)
        return found


# -- the machine ----------------------------------------------------------------------------------------------------------------------------------


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


def devices() -> list[int]:
    """Bytes of each GPU here."""
    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]


def ram() -> int:
    """Bytes of this machine's memory."""
    return psutil.virtual_memory().total


def free_room(config: Config) -> int:
    """Bytes where run.dir is, or will be."""
    folder = Path(str(config.run.dir)).absolute()
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free


def look_at_disk(config: Config, models: Models, report: Report) -> None:
    """Room in run.dir for the checkpoints that are kept, one more while it is written, and the model at the end."""
    trained = models.actor.trained + (models.critic.trained if models.critic else 0)
    sets = int(config.actor.ema.decay is not None) + int(config.algo.old_policy == "lagged")
    each = CHECKPOINTED * trained + 4 * sets * models.actor.trained
    kept = (
        0 if config.checkpoint.every == 0 else config.checkpoint.keep_last + 1 + config.checkpoint.keep_best
    )
    export = (
        BYTES[config.actor.model.dtype] * models.actor.parameters * (1 + (config.actor.ema.decay is not None))
    )
    export += BYTES[config.critic.model.dtype] * models.critic.parameters if models.critic else 0
    free = free_room(config)
    needed = kept * each + export
    sums = f"{kept} checkpoints of {in_gib(each)} and the export of {in_gib(export)} are {in_gib(needed)}; {in_gib(free)} are free"
    remedy = "" if needed <= free else "; choose another run.dir, or lower checkpoint.keep_last"
    report.add("disk", f"run.dir={config.run.dir}: {sums}{remedy}", ok=needed <= free)


def look_at_host(needed: int, per_node: int, on_gpu: bool, report: Report) -> None:
    """Shared memory, and CPU memory for what is offloaded."""
    shm = Path("/dev/shm")
    if shm.exists():
        size = shutil.disk_usage(shm).total
        short = on_gpu and per_node > 1 and size < SMALL_SHM
        report.add(
            "/dev/shm",
            in_gib(size) + ("; several GPUs want 1 GiB or more: docker run --ipc=host" if short else ""),
            ok=not short,
        )
    if needed:
        text = f"{in_gib(needed)} a rank for what is offloaded, {in_gib(needed * per_node)} on a node; this machine has {in_gib(ram())}"
        report.add("host", text, ok=True)


def in_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


# -- what is read ------------------------------------------------------------------------------------------------------------------------------


def look_at_inputs(config: Config, report: Report) -> tuple[Tokenizer | None, int | None]:
    """The actor's tokenizer, and the tokens of the longest prompt, where they could be read."""
    tokenizer = report.tried("tokenizer", lambda: build_tokenizer(config), lambda t: f"{t.vocab_size} tokens")
    if tokenizer is None:
        return None, None
    report.tried(
        "sampling",
        lambda: stop_ids(config, tokenizer),
        lambda ids: f"answers end with {_ends(tokenizer, ids)}",
    )
    before = len(report.lines)
    source = report.tried(
        "data",
        lambda: build_prompts(config, tokenizer),
        lambda s: f"{s.path}: {counted(s.report, 'prompts')}; {_longest(s)}",
    )
    held_out = report.tried(
        "held out",
        lambda: build_held_out(config, tokenizer),
        lambda s: s and f"{s.path}: {counted(s.report, 'prompts')}",
    )
    ptx = report.tried(
        "texts",
        lambda: build_ptx(config, tokenizer),
        lambda s: s and f"{s.source.path}: {counted(s.source.report, 'texts')}",
    )
    made = report.tried("reward", lambda: bind(config.reward, "reward"), lambda _: None)
    if source is None or made is None or not all(line.ok for line in report.lines[before:]):
        return tokenizer, source and source.longest
    rollout = config.rollout
    stream = report.tried(
        "data",
        lambda: PromptStream(
            source, prompts_per_step=rollout.prompts_per_step, samples_per_prompt=rollout.samples_per_prompt
        ),
        lambda _: None,
    )
    if stream is not None:
        inputs = Inputs(tokenizer, source, held_out, stream, ptx)
        report.tried(
            "reward", lambda: preflight(config, inputs), lambda _: "ok, as far as can be seen without weights"
        )
    return tokenizer, max(s.longest for s in (source, held_out) if s is not None)


def is_to_be_made(config: Config) -> bool:
    """Whether ``prepare`` has yet to make what the run reads."""
    return config.prepare is not None and not Path(config.actor.model.path).exists()


def _ends(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return (
        ", ".join(repr(tokenizer.decode([i], skip_special_tokens=False)) for i in ids)
        or "the length limit alone"
    )


def _longest(source: Source) -> str:
    return f"the longest has {source.longest} tokens"
