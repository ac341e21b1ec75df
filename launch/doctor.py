"""Checks a run before it starts: python launch/doctor.py +experiment=rlhf [KEY=VALUE ...] [--gpu h100] ...

It takes the command line of launch/train.py and reports whether models, data and reward can be read. It also
estimates the memory and the time of each phase, and the hours of the run. Models are read from their
config.json files; no weights are loaded. Without the Hub, the models of conf/ have the shapes included in
ppo_ds, and texts count with the maximum length in the config. Without --gpu, --gpus, --nodes and --gpu-mem it
checks this machine. With any of these, the disk, /dev/shm and CPU memory that a cluster needs are printed but
not checked.

    --gpu NAME        a row of ppo_ds/tools/doctor/gpus.py: h100, a100, rtx4090, ...; needed for the time
    --gpus N          GPUs of the run; with --nodes, GPUs of each node
    --nodes N         nodes; the default is as many as the GPUs need, 8 to a node
    --gpu-mem GIB     memory of each GPU, instead of the table's (without --gpu: 79.2, that of an H100)
    --assume NAME=VALUE ...   efficiencies and mean lengths, such as mfu=0.45 response=300

Exit code 0: the run can start and fits, or no error was found and memory is not estimated because `prepare`
creates the models when the run starts; 1: it does not fit, or an input cannot be read; 2: the config or an
option is wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser, load_config
from launch.hub import use_caches_without_the_hub
from launch.process import complain, prepare_environment
from ppo_ds.commands.entry_points import with_commands
from ppo_ds.config.checks.data import hub_names
from ppo_ds.errors import UserError

LARGEST = 100_000  # number of GPUs, of nodes, and of GiB of a GPU


def main(argv: list[str]) -> int:
    try:
        options, overrides = parse(argv)
        os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "5")
        prepare_environment(verbose=False)
        # imported only now, because it imports torch, which reads the environment
        from ppo_ds.tools.doctor.cluster import cluster_of

        cluster = cluster_of(options.gpu, options.gpus, options.nodes, options.gpu_mem)
        config = load_config(overrides, world_size=cluster.ranks)
        use_caches_without_the_hub(hub_names(config), seconds=5.0)
        # imported only now, because it imports huggingface_hub, which reads the environment too
        from ppo_ds.tools.doctor.step_time import check_lengths, read_assumptions

        assumed = read_assumptions(options.assume, cluster.gpu_memory is not None)
        check_lengths(assumed, config)
    except UserError as error:
        return complain(error)
    # imported only here, because it imports deepspeed and transformers, which takes seconds
    from ppo_ds.tools.doctor.diagnose import diagnose

    gc.enable()
    return 0 if diagnose(config, cluster, assumed) else 1


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(prog="launch/doctor.py", add_help=False)
    parser.add_argument("--gpu")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--gpu-mem", type=float)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--assume", nargs="+", action="extend", default=[])
    options, overrides = parser.parse_known_args(argv)
    if {"--help", "-h"} & set(overrides):
        print(f"{with_commands(__doc__)}\nIt also takes the arguments of launch/train.py:\n")
    for name in ("gpus", "gpu_mem", "nodes"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= LARGEST:
            raise UserError(f"--{name.replace('_', '-')}={value:g}: must be above 0 and at most {LARGEST}")
    # --assume takes all that follows it; keys with a dot and +experiment=... belong to the config
    given, options.assume = options.assume, []
    for setting in given:
        of_config = "." in setting.partition("=")[0] or setting[0] in "+~"
        (overrides if of_config else options.assume).append(setting)
    return options, overrides


if __name__ == "__main__":
    gc.disable()  # until everything is imported, as in train.py
    sys.exit(main(sys.argv[1:]))
