"""Formats the estimated time and cost of a run."""

from __future__ import annotations

from collections.abc import Mapping

from ppo_ds.config.schema import Config
from ppo_ds.planning.run_memory import Estimate
from ppo_ds.tools.doctor.plan import Plan
from ppo_ds.tools.doctor.rates import OPTIONS, Machine
from ppo_ds.tools.doctor.step_time import PhaseTime


def time_report(config: Config, plan: Plan, machine: Machine, memory: Estimate) -> str:
    """Returns lines on the seconds of each phase, what bounds them, the whole run, and the assumptions."""
    step_time = plan.step_time(config, machine, memory)
    phases = step_time.phases()
    step = sum(phase.seconds for phase in phases.values())
    lines = ["time       estimated, in seconds", *phase_lines(phases)]
    total = (config.run.steps or 0) * step
    saves = _checkpoints(config, step)
    if plan.checkpoint and saves:
        each = machine.disk(plan.checkpoint)
        total += saves * each
        lines.append(_row("checkpoint", _seconds(each), "", f"disk; {saves:.0f} in the run"))
    evaluations = 2 + (config.run.steps or 0) // config.eval.every if config.eval.every else 2
    if plan.evaluated:
        evaluation = step_time.evaluation(plan.evaluated)
        total += evaluations * evaluation.seconds
        lines.append(
            _row("eval", _seconds(evaluation.seconds), "", f"{evaluation.bound}; {evaluations} in the run")
        )
    if config.run.steps is not None:
        hours = total / 3600
        cost = f", {hours * machine.ranks:,.1f} GPU-hours" if machine.on_gpu else ""
        lines.append(f"run        {config.run.steps} steps: {hours:,.1f} hours{cost}")
    return "\n".join([*lines, *_assumptions(machine)])


def phase_lines(phases: Mapping[str, PhaseTime]) -> list[str]:
    """Returns the table of the phases of a step, and what bounds them."""
    step = sum(phase.seconds for phase in phases.values())
    lines = [_row("phase", "seconds", "share", "bound by")]
    for name, phase in phases.items():
        detail = f": {phase.detail}" if phase.detail else ""
        share = f"{100 * phase.seconds / step:.0f} %"
        lines.append(_row(name, _seconds(phase.seconds), share, phase.bound + detail))
    longest = max(phases, key=lambda name: phases[name].seconds)
    return [*lines, _row("step", _seconds(step), "", f"mostly {longest}, by {phases[longest].bound}")]


def _checkpoints(config: Config, step: float) -> float:
    """Returns the number of checkpoints of the run: by steps, by minutes, and at its end."""
    steps, settings = config.run.steps or 0, config.checkpoint
    if settings.every == 0:
        return 0
    by_steps = steps / settings.every if settings.every else 1
    return max(by_steps, steps * step / (60 * settings.minutes) if settings.minutes else 0)


def _assumptions(machine: Machine) -> list[str]:
    """Returns lines with the rates of the device and every assumed number."""
    device, assumed = machine.device, machine.assumed
    where = "never measured on one" if machine.on_gpu else "from W1 and W2"
    lines = [
        f"rates      {device.name}: {device.bf16:,.4g} TFLOPS in 16 bits, {device.fp32:,.4g} in fp32; GB/s: "
        f"{device.bandwidth:,.4g} memory, {device.node_link:.4g} in the node, {device.host_link:.4g} to the "
        f"CPU, {device.network:.4g} network; {device.source}",
        f"assumed    {where}; set by --assume NAME=VALUE ...",
    ]
    return lines + [
        f"  {name:<14}{format(assumed[name], 'g') if name in assumed else '-':>6}  {option.description}"
        for name, option in OPTIONS.items()
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.3f}"


def _row(name: str, seconds: str, share: str, bound: str) -> str:
    return f"  {name:<14}{seconds:>10}{share:>8}   {bound}"
