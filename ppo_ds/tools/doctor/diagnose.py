"""Diagnoses a run before it starts: prints all checks, the memory estimate and suggested changes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ppo_ds.assemble.banner import batch_equation
from ppo_ds.assemble.preflight import check_engine_package
from ppo_ds.compute import matmul
from ppo_ds.config.schema import Config, PPOConfig, main_model_path, trained_models
from ppo_ds.engine.memory_budget import GIB, cpu_memory, format_bytes
from ppo_ds.planning.budgets import resolve, with_numbers
from ppo_ds.planning.run_memory import USABLE, Estimate, Hardware
from ppo_ds.planning.vllm_memory import kv_heads
from ppo_ds.tools.doctor.cluster import Cluster, cpu_device
from ppo_ds.tools.doctor.finetune import batch_line, plan_finetuning
from ppo_ds.tools.doctor.gpus import GPUS
from ppo_ds.tools.doctor.model_shapes import with_shipped_shapes
from ppo_ds.tools.doctor.ppo import plan_ppo
from ppo_ds.tools.doctor.report import Report, check_disk, check_host, free_disk, versions
from ppo_ds.tools.doctor.step_time import Assumptions, Machine, Plan, time_report
from ppo_ds.tools.doctor.suggest import format_settings, suggest_reductions

MAX_REDUCTIONS = 8  # maximum number of suggestions that are printed


def diagnose(config: Config, cluster: Cluster, assumed: Assumptions) -> bool:
    """Prints the diagnosis; returns False if an error was found or the run does not fit into memory."""
    matmul.use(config.run.matmul)  # as a run does, which may then need memory for packed weights
    per_node = cluster.per_node
    hardware, report = Hardware(cluster.ranks, cluster.gpu_memory), Report()
    report.add("for", str(cluster))
    report.add("versions", versions())
    if os.environ.get("HF_HUB_OFFLINE") == "1" and (shipped := with_shipped_shapes(config)) != config:
        report.add("shapes", "Hub models that are not in the cache have the shapes that ship with ppo_ds")
        config = shipped
    if isinstance(config, PPOConfig) and cluster.is_this_machine:
        report.attempt("decode", partial(check_engine_package, config))
    plan, found = None, None
    reason = "see the errors above"
    if config.prepare is not None and not Path(main_model_path(config)).exists():
        reason = "`prepare` creates models and data when the run starts, so they were not checked"
        if cluster.is_this_machine:
            report.add("disk", f"run.dir={config.run.dir}: {format_bytes(free_disk(config))} free")
    else:
        make_plan: Callable[..., Plan | None] = plan_ppo if config.stage == "ppo" else plan_finetuning
        plan = make_plan(config, hardware, report)
    of_gpu = hardware.usable  # None on CPUs
    usable = int(USABLE * cpu_memory(per_node)) if of_gpu is None else max(0, of_gpu)
    lines: list[str] = []
    if plan is not None:
        budgets = resolve(config, plan.estimate, usable, hardware.on_gpu)
        config, lines = with_numbers(config, budgets.numbers), budgets.lines
        found = plan.estimate(config)
        check_disk(config, plan.checkpoint, plan.exported, report, cluster.is_this_machine)
    check_host(found.host if found else 0, plan.exported if plan else [], cluster, report)
    print("\n".join(map(str, report.lines)))
    describe_batch: Callable[..., list[str]] = batch_equation if config.stage == "ppo" else batch_line
    print("\n".join(describe_batch(config, hardware.ranks)))
    if hardware.gpu_memory is not None and usable == 0:
        print(
            f"too much   a GPU of {format_bytes(hardware.gpu_memory)} is smaller than the "
            f"{format_bytes(hardware.context)} that CUDA itself needs: nothing can run on it"
        )
        return False
    if found is None or plan is None:
        print(f"memory     not estimated: {reason}")
        return report.errors == 0
    print(_table(found))
    print("\n".join(lines), end="\n" if lines else "")
    print(f"work       up to {plan.flops / 1e12:,.3g} TFLOP per step over all ranks")
    fits = _print_fit(config, plan, cluster, usable, found)
    machine = _machine(config, plan, cluster, assumed)
    if machine is None:
        print(f"time       not estimated: name the GPU by --gpu; the table has {', '.join(GPUS)}")
    else:
        print(time_report(config, plan, machine, found))
    return fits and report.errors == 0


def _machine(config: Config, plan: Plan, cluster: Cluster, assumed: Assumptions) -> Machine | None:
    """Returns the machine for which times are estimated, or None if the table of GPUs lacks its GPU."""
    on_gpu = cluster.gpu_memory is not None
    tf32, device = on_gpu and torch.backends.cuda.matmul.allow_tf32, cluster.gpu
    if not on_gpu:
        dtype = str(next(iter(trained_models(config).values())).model.dtype)
        device = cpu_device(plan.main, dtype, cluster.ranks, config.run.threads)
    if device is None:
        return None
    return Machine(device, assumed, cluster.ranks, cluster.per_node, on_gpu, tf32)


def _table(found: Estimate) -> str:
    """Formats the memory of each rank in GiB: resident memory by role, and the peak of each phase."""

    def row(name: str, *cells: int | str) -> str:
        texts = [cell if isinstance(cell, str) else f"{cell / GIB:.2f}" for cell in cells]
        return f"  {name:<28}" + "".join(f"{text:>11}" for text in texts)

    header = row("resident", "weights", "masters", "moments", "buffers", "total")
    lines = ["memory     GiB on each rank", header]
    for role, total in found.resident.items():
        if engine := found.engines.get(role):
            parts = (engine.weights, engine.masters, engine.moments, engine.buffers)
            lines.append(row(role, *parts, total))
        else:
            lines.append(row(role, total, "", "", "", total))
    lines.append(row("phase", "peak"))
    for phase, peak in found.phases.items():
        notes = [found.generation] if phase == "generate" else []
        notes += ["highest peak"] if phase == found.peak_phase else []
        lines.append(row(phase, peak) + "".join(f"   {note}" for note in notes))
    return "\n".join(lines)


def _print_fit(config: Config, plan: Plan, cluster: Cluster, usable: int, found: Estimate) -> bool:
    """Prints whether the run fits into memory, and config changes that help; returns whether it fits."""
    where = "available for tensors" if cluster.gpu_memory is not None else "per rank on this machine"
    room = f"{format_bytes(usable)} {where}"
    if found.peak <= usable:
        print(f"fits       {format_bytes(found.peak)} of {room}")
        return True
    print(f"too much   {format_bytes(found.peak)} in {found.peak_phase}, of {room}")
    heads = math.gcd(plan.main.heads, kv_heads(plan.main), cluster.per_node)
    parts = [n for n in range(2, heads + 1) if heads % n == 0]
    single, combined, peak = suggest_reductions(config, plan.estimate, usable, parts)
    single = single[:MAX_REDUCTIONS]
    for settings, left in single:
        verdict = "" if left > usable else ", fits"
        print(f"           {format_settings(settings)} reduces it to {format_bytes(left)}{verdict}")
    if combined and combined not in [settings for settings, _ in single]:
        verdict = "fits" if peak <= usable else "the lowest found; use more GPUs, a smaller model or LoRA"
        print(f"           all of {format_settings(combined)} reduce it to {format_bytes(peak)}, {verdict}")
    return False
