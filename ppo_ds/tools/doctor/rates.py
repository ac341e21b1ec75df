"""Assumed efficiencies, and the time that computation and transfers take on one rank with them.

The defaults for GPUs are assumptions that were not measured on one. Those for CPUs were calibrated with the
workloads W1 and W2 of benchmarks/workloads.py (docs/scaling.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from ppo_ds.config.schema import Config
from ppo_ds.errors import UserError
from ppo_ds.tools.doctor.gpus import Device

# bounds of a number that --assume sets
SHARE, ANY_SHARE, NUMBER = (1e-9, 1.0), (0.0, 1.0), (1e-9, 1e9)
BOUNDS = {SHARE: "at most 1, and above 0", ANY_SHARE: "from 0 to 1", NUMBER: "a number above 0"}


@dataclass(frozen=True)
class Option:
    """A number that --assume can set. Without a default it is absent unless it is set."""

    default: float | None
    description: str
    bounds: tuple[float, float] = NUMBER
    on_cpu: float | None = None  # the default on a CPU, where each kernel costs a call from Python


OPTIONS = {
    "mfu": Option(0.4, "of the peak FLOP/s in updates, recomputed forwards included", SHARE, 0.75),
    "forward": Option(0.5, "of the peak FLOP/s in forwards over whole rows, prefill included", SHARE, 0.8),
    "decode": Option(0.6, "of the memory bandwidth in decode steps", SHARE, 0.35),
    "decode_mfu": Option(0.4, "of the peak FLOP/s in decode steps", SHARE, 0.75),
    "adam": Option(0.6, "of the memory bandwidth in optimizer steps", SHARE, 0.5),
    "links": Option(0.7, "of the bandwidth of NVLink, PCIe and the network", SHARE),
    "overlap": Option(
        0.5, "of the shorter of computation and ZeRO-3's gathers, hidden by the other", ANY_SHARE, 0.0
    ),
    "kernels": Option(40, "kernels of a decoder layer in a forward"),
    "launch_us": Option(8, "microseconds of the host for each kernel, without CUDA graphs", on_cpu=18),
    "graph_us": Option(1.5, "microseconds between two kernels of a CUDA graph"),
    "collective_us": Option(40, "microseconds of a collective, besides its transfer"),
    "host_gb": Option(20, "GB/s of CPU memory for each rank in offloaded optimizer steps"),
    "disk_gb": Option(1, "GB/s of all ranks together for checkpoints"),
    "network_gb": Option(None, "GB/s of the network for each GPU, instead of the table's"),
    "prompt": Option(None, "tokens of a prompt on average"),
    "response": Option(None, "tokens of a response on average, instead of the maximum"),
}
Assumptions = Mapping[str, float]  # by the names in OPTIONS
MAX_LENGTHS = {  # stage -> mean lengths that it uses, and the keys of their maxima
    "ppo": {"prompt": "data.max_prompt_tokens", "response": "sampling.max_new_tokens"},
    "sft": {"prompt": "sft.max_tokens"},
    "reward_model": {"prompt": "reward_model.max_tokens"},
}


def read_assumptions(settings: Iterable[str], on_gpu: bool) -> Assumptions:
    """Returns the defaults with ``settings`` (NAME=VALUE) applied; raises UserError for wrong settings."""
    values = {name: option.default for name, option in OPTIONS.items() if option.default is not None}
    if not on_gpu:
        values |= {name: option.on_cpu for name, option in OPTIONS.items() if option.on_cpu is not None}
    problems = []
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if name not in OPTIONS:
            problems.append(f"--assume {setting}: no such assumption; there are {', '.join(OPTIONS)}")
            continue
        least, most = bounds = OPTIONS[name].bounds
        if not least <= value <= most:
            problems.append(f"--assume {setting}: must be {BOUNDS[bounds]}")
        values[name] = value
    if problems:
        raise UserError(*problems)
    return values


def check_lengths(assumed: Assumptions, config: Config) -> None:
    """Raises UserError if a mean length is assumed that is above the maximum of the config."""
    problems = []
    for name, key in MAX_LENGTHS[config.stage].items():
        value, most = assumed.get(name), attrgetter(key)(config)
        if value is not None and value > most:
            problems.append(
                f"--assume {name}={value:g}: must be at most {key}={most}; lower it or raise {key}"
            )
    if problems:
        raise UserError(*problems)


@dataclass(frozen=True)
class Machine:
    """The devices of a run, and the efficiencies that are assumed for them."""

    device: Device
    assumed: Assumptions
    ranks: int
    per_node: int
    on_gpu: bool
    tf32: bool = False

    def products(self, flops: float, dtype: str, share: float) -> float:
        """Returns the seconds of matrix products on one rank, at a share of the peak."""
        return flops / (self.device.flops(dtype, self.tf32) * share)

    def memory(self, size: float, share: float) -> float:
        """Returns the seconds of reading or writing bytes of the device's memory."""
        return size / (self.device.bandwidth * 1e9 * share)

    def launches(self, layers: float, microseconds: float) -> float:
        """Returns the seconds between the kernels of ``layers`` decoder layers."""
        return layers * self.assumed["kernels"] * microseconds / 1e6

    def gather(self, size: float, collectives: float = 1, group: int | None = None) -> float:
        """Returns the seconds in which every rank of a group receives the rest of ``size`` bytes.

        The ranks hold equal shares. A reduce-scatter takes as long. ``group`` is the number of consecutive
        ranks that hold all shares; the default is all ranks. A node receives what other nodes hold through
        the network adapters of all its GPUs, and its GPUs exchange it over the node's links at the same time
        (NCCL's rings).
        """
        group = group or self.ranks
        if group == 1:
            return 0.0
        local = min(group, self.per_node)
        nodes = -(-group // local)
        inside = size * (group - 1) / group / self.device.node_link if local > 1 else 0.0
        network = self.assumed.get("network_gb") or self.device.network
        across = size * (nodes - 1) / nodes / (local * network)
        latency = collectives * self.assumed["collective_us"] / 1e6
        return max(inside, across) / (1e9 * self.assumed["links"]) + latency

    def host_copy(self, size: float) -> float:
        """Returns the seconds of copying bytes between a GPU and CPU memory."""
        return size / (self.device.host_link * 1e9 * self.assumed["links"])

    def host_memory(self, size: float) -> float:
        """Returns the seconds of reading or writing bytes of CPU memory on one rank."""
        return size / (self.assumed["host_gb"] * 1e9)

    def disk(self, size: float) -> float:
        """Returns the seconds of writing bytes by all ranks together."""
        return size / (self.assumed["disk_gb"] * 1e9)
