"""Checks a run before it starts: python launch/doctor.py +experiment=rlhf [KEY=VALUE ...] [--gpus 8] ...

It takes the command line of launch/train.py, reports whether models, data and reward can be read, and
estimates the memory of each phase. Models are read from their config.json files; no weights are loaded.
Without --gpus and --gpu-mem it checks for this machine.

Exit code 0: the run can start and fits; 1: it does not fit, or an input cannot be read; 2: the config is
wrong.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser, load_config  # noqa: E402
from launch.train import complain, prepare_environment  # noqa: E402
from ppo_ds.errors import UserError  # noqa: E402

DEFAULT_GPU_MEM = 80.0  # GiB, if --gpus is given without --gpu-mem
GIB = 2**30


def main(argv: list[str]) -> int:
    try:
        parser = Parser(prog="launch/doctor.py", add_help=False, allow_abbrev=False)
        parser.add_argument("--gpus", type=int, help="on each node")
        parser.add_argument("--gpu-mem", type=float, help="GiB of each GPU")
        parser.add_argument("--nodes", type=int, default=1)
        options, overrides = parser.parse_known_args(argv)
        if {"--help", "-h"} & set(overrides):
            print(f"{__doc__}\n{parser.format_usage()}\nIt also takes the arguments of launch/train.py:\n")
        for name in ("gpus", "gpu_mem", "nodes"):
            value = getattr(options, name)
            if value is not None and value <= 0:
                raise UserError(f"--{name.replace('_', '-')}={value:g}: must be above 0")
        os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "5")
        prepare_environment(verbose=False)
        from ppo_ds.tools.doctor.report import gpu_memory

        gpus = gpu_memory()
        per_node = options.gpus or len(gpus) or 1
        config = load_config(overrides, world_size=per_node * options.nodes)
    except UserError as error:
        return complain(error)
    # imported only here, because it imports deepspeed and transformers, which takes seconds
    from ppo_ds.tools.doctor.diagnose import diagnose

    if options.gpus is not None or options.gpu_mem is not None:
        memory = int((options.gpu_mem or DEFAULT_GPU_MEM) * GIB)
    else:
        memory = min(gpus, default=None)
    return 0 if diagnose(config, per_node, options.nodes, memory) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
