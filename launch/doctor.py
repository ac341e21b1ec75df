"""What a run will need, before it runs: `python launch/doctor.py +experiment=rlhf [KEY=VALUE ...] [--gpus 8] [--gpu-mem 80] [--nodes 1]`.

The command line is that of launch/train.py, and --gpus are those of a node; without them it is about this machine. Models are known by their
config.json alone: no weights are read.
Exit code 0: all is well; 1: something does not fit, or cannot be read; 2: the config is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import load_config  # noqa: E402
from launch.train import complain, prepare_environment  # noqa: E402
from ppo_ds.errors import UserError  # noqa: E402

if TYPE_CHECKING:
    from ppo_ds.config.schema import Config
    from ppo_ds.tools.doctor.estimate import Estimate, Models, Place

USUAL_MEMORY = 80.0  # GiB of a GPU that nobody has described
GIB = 2**30
MOST_REMEDIES = 8


def main(argv: list[str]) -> int:
    try:
        options, rest = _options(argv)
        os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "5")
        prepare_environment(verbose=False)
        from ppo_ds.tools.doctor.report import devices

        here = devices()
        per_node = options.gpus or len(here) or 1
        config = load_config(rest, world_size=per_node * options.nodes)
    except UserError as error:
        return complain(error)
    asked = options.gpus is not None or options.gpu_mem is not None
    memory = int((options.gpu_mem or USUAL_MEMORY) * GIB) if asked else min(here, default=None)
    return examine(config, per_node, options.nodes, memory)


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    def fail(message: str) -> Any:
        raise UserError(message)

    parser = argparse.ArgumentParser(prog="launch/doctor.py", add_help=False, allow_abbrev=False)
    parser.error = fail  # type: ignore[method-assign]
    parser.add_argument("--gpus", type=int, help="of each node")
    parser.add_argument("--gpu-mem", type=float, help="GiB of each GPU")
    parser.add_argument("--nodes", type=int, default=1)
    options, rest = parser.parse_known_args(argv)
    if {"--help", "-h"} & set(rest):
        print(f"{__doc__}\n{parser.format_usage()}\nand what launch/train.py takes:\n")
    for name, value in (("--gpus", options.gpus), ("--gpu-mem", options.gpu_mem), ("--nodes", options.nodes)):
        if value is not None and value <= 0:
            raise UserError(f"{name}={value:g}: must be above 0")
    return options, rest


def examine(config: Config, per_node: int, nodes: int, memory: int | None) -> int:
    """Prints everything; the exit code. ``memory``: bytes of a GPU; None: on CPUs."""
    from ppo_ds.build.banner import batch_equation
    from ppo_ds.tools.doctor.estimate import Place, estimate
    from ppo_ds.tools.doctor.model_shapes import plan_models
    from ppo_ds.tools.doctor.report import (
        Report,
        free_room,
        in_gib,
        is_to_be_made,
        look_at_disk,
        look_at_host,
        look_at_inputs,
        versions,
    )

    place, report = Place(per_node * nodes, memory), Report()
    where = f"GPU(s) of {in_gib(memory)}" if memory is not None else "rank(s) on CPUs"
    report.add(
        "for", f"{place.ranks} {where}" + (f", {per_node} on each of {nodes} nodes" if nodes > 1 else "")
    )
    report.add("versions", versions())
    models, found, longest = None, None, None
    unseen = "not estimated: see above"
    if is_to_be_made(config):
        unseen = "not estimated: models and data were not looked at, since `prepare` has not run; it does when the run starts"
        report.add("disk", f"run.dir={config.run.dir}: {in_gib(free_room(config))} are free")
    else:
        tokenizer, longest = look_at_inputs(config, report)
        models = plan_models(config, tokenizer, report)
    if models is not None:
        found = estimate(config, models, place, longest)
        look_at_disk(config, models, report)
    look_at_host(found.host if found else 0, per_node, memory is not None, report)
    print("\n".join(map(str, report.lines)))
    print("\n".join(batch_equation(config, place.ranks)))
    if found is None or models is None:
        print(f"memory     {unseen}")
        return int(any(not line.ok for line in report.lines))
    fits = _memory(config, models, place, per_node, longest, found)
    return 0 if fits and all(line.ok for line in report.lines) else 1


def _memory(
    config: Config, models: Models, place: Place, per_node: int, longest: int | None, found: Estimate
) -> bool:
    """The table, and what to do. Whether it fits."""
    from ppo_ds.tools.doctor.estimate import CONTEXT, estimate, step_flops
    from ppo_ds.tools.doctor.report import in_gib, ram
    from ppo_ds.tools.doctor.suggest import growth, remedies, spelled

    again = partial(estimate, models=models, place=place, longest_prompt=longest)
    print(_table(found))
    print(f"work       up to {step_flops(config, models, longest) / 1e12:,.3g} TFLOP a step, over all ranks")
    if place.usable is not None and place.usable <= 0:
        print(
            f"too much   {in_gib(place.room)} of a GPU is less than the {in_gib(CONTEXT)} that CUDA itself takes: nothing can run there"
        )
        return False
    usable = ram() // per_node if place.usable is None else place.usable
    room = f"{in_gib(usable)} " + ("for each rank on this machine" if place.usable is None else "for tensors")
    beside = " beside the imported libraries" if place.usable is None else ""
    if found.peak <= usable:
        more = growth(config, again, usable)
        print(
            f"fits       {in_gib(found.peak)}{beside} of {room}"
            + (f"; alone, there is room for any of: {spelled(more)}" if more else "")
        )
        return True
    print(f"too much   {in_gib(found.peak)} in {found.peak_phase}, and there are {room}")
    alone, together, peak = remedies(config, again, usable)
    for settings, left in alone[:MOST_REMEDIES]:
        print(
            f"           {spelled(settings)} brings it to {in_gib(left)}{'' if left > usable else ': fits'}"
        )
    what = "fits" if peak <= usable else "the least that could be found: more GPUs, a smaller model or LoRA"
    if together and together not in [settings for settings, _ in alone[:MOST_REMEDIES]]:
        print(f"           together {spelled(together)}: {in_gib(peak)}: {what}")
    return False


def _table(found: Estimate) -> str:
    """GiB on each rank: what stays by role, and the peak of each phase."""

    def row(name: str, *cells: Any) -> str:
        return f"  {name:<28}" + "".join(
            f"{cell:>11}" if isinstance(cell, str) else f"{cell / GIB:>11.2f}" for cell in cells
        )

    lines = [
        "memory     GiB on each rank",
        row("what stays", "weights", "masters", "moments", "buffers", "in all"),
    ]
    for role, total in found.resting.items():
        engine = found.engines.get(role)
        parts = (
            (engine.weights, engine.masters, engine.moments, engine.buffers)
            if engine
            else (total, "", "", "")
        )
        lines.append(row(role, *parts, total))
    lines += [row("phase", "peak")]
    for phase, peak in found.phases.items():
        note = (
            f"   {found.generation}"
            if phase == "generate"
            else "   the most"
            if phase == found.peak_phase
            else ""
        )
        lines.append(row(phase, peak) + note)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
