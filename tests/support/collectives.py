"""Records the collectives of each rank, and compares the records of all ranks.

    record_collectives(folder / f"rank{rank}.jsonl")    # on each rank, before it joins the process group
    assert differences([read_calls(file) for file in files]) == []

World, DeepSpeed and other libraries all communicate through the functions of torch.distributed. Each call is
written at once, so that the record of a rank that hangs or is killed is complete too.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# the argument that holds this rank's tensor, or tensors, in each recorded function
TENSORS = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "all_gather": "tensor",
    "all_gather_coalesced": "input_tensor_list",
    "all_gather_into_tensor": "input_tensor",
    "_all_gather_base": "input_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "_reduce_scatter_base": "input",
    "broadcast": "tensor",
    "reduce": "tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
}
OTHERS = (
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "new_group",
)
# newer names, which older versions of torch lack, and the functions that they replace
RENAMED = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
# collectives of gloo in each of these functions; 1 in all others
COSTS = {"all_gather_object": 2, "broadcast_object_list": 2, "new_group": 0}
DETAILS = ("op", "src", "dst")  # arguments on which the ranks must agree


@dataclass(frozen=True)
class Call:
    """One collective of one rank; ``dtype`` and ``shape`` are empty for collectives without a tensor."""

    name: str
    group: tuple[int, ...]  # the ranks that take part
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = f" {list(self.shape)}" if self.dtype else ""
        return f"{self.name}{f' {self.dtype}' * bool(self.dtype)}{shape}"


def record_collectives(file: Path) -> None:
    """Writes a line to ``file`` for each collective of this process from now on.

    A collective that another one calls, such as the two of all_gather_object, is not recorded.
    """
    written = file.open("w", buffering=1)
    running: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not running:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                written.write(json.dumps(asdict(_described(name, bound.arguments))) + "\n")
            running.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()

        return call

    names = [*TENSORS, *OTHERS, *(name for name in RENAMED if name in vars(distributed_c10d))]
    for name in names:
        wrapper = recorded(name, vars(distributed_c10d)[name])
        for module in (dist, distributed_c10d):
            setattr(module, name, wrapper)


def _described(name: str, arguments: dict[str, Any]) -> Call:
    name = RENAMED.get(name, name)
    tensors = arguments[TENSORS[name]] if name in TENSORS else []
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    details = [str(arguments[key]).rpartition(".")[2] for key in DETAILS if arguments.get(key) is not None]
    if name == "new_group":
        ranks = arguments["ranks"]
        group, details = None, ["all" if ranks is None else str(list(ranks))]
    else:
        group = arguments["group"]
    return Call(
        name=" ".join([name, *details]),
        group=tuple(dist.get_process_group_ranks(group)),
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        shape=tuple(tensors[0].shape) if len(tensors) == 1 else tuple(x.numel() for x in tensors),
    )


def unrecorded(calls: Sequence[Call]) -> dict[tuple[int, ...], int]:
    """Compares ``calls`` of this process with the counters of its gloo groups.

    Returns the number of collectives that are missing in ``calls`` for each set of ranks, or {}.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for group in distributed_c10d._world.pg_map:
        counts[tuple(dist.get_process_group_ranks(group))] += group._get_sequence_number_for_group()
    for call in calls:
        counts[call.group] -= COSTS.get(call.name.partition(" ")[0], 1)
    return {group: count for group, count in counts.items() if count}


def read_calls(file: Path) -> list[Call]:
    """Returns the calls that ``record_collectives`` has written."""
    calls = []
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        calls.append(Call(**entry | {"group": tuple(entry["group"]), "shape": tuple(entry["shape"])}))
    return calls


def differences(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """Compares the calls of each rank with those of lower ranks, in the groups that both belong to.

    Returns a line for the first difference of each rank, or [] if there is none. Calls are counted from 1.
    """
    found = []
    for rank in range(1, len(ranks)):
        lines = (_first_difference(ranks, rank, other) for other in range(rank))
        found += [line for line in lines if line is not None][:1]
    return found


def _first_difference(ranks: Sequence[Sequence[Call]], rank: int, other: int) -> str | None:
    if list(ranks[rank]) == list(ranks[other]):
        return None
    mine, theirs = (
        [(i, call) for i, call in enumerate(ranks[which], start=1) if {rank, other} <= set(call.group)]
        for which in (rank, other)
    )
    end = (0, "no further call")
    for index in range(max(len(mine), len(theirs))):
        number, call = mine[index] if index < len(mine) else (len(ranks[rank]) + 1, end[1])
        _, expected = theirs[index] if index < len(theirs) else end
        if call != expected:
            where = ""
            if isinstance(call, type(expected)) and call.group != expected.group:
                where = f"; groups {list(call.group)} and {list(expected.group)}"
            return f"rank {rank}, call {number}: {call} against {expected} of rank {other}{where}"
    return None


def find_cycle(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """Looks for collectives that wait for one another if each rank starts a call after its earlier calls.

    A collective is the nth call of its group, which all ranks of the group must have in common. Returns the
    collectives of a cycle, each of which some rank calls before the next one, or [] if there is no cycle.
    """
    earlier: dict[tuple[Any, int], set[tuple[Any, int]]] = {}
    for calls in ranks:
        counts: Counter[tuple[int, ...]] = Counter()
        previous = None
        for call in calls:
            node = (call.group, counts[call.group])
            counts[call.group] += 1
            earlier.setdefault(node, set()).update([] if previous is None else [previous])
            previous = node
    try:
        TopologicalSorter(earlier).prepare()
    except CycleError as error:
        return [f"call {number + 1} of group {list(group)}" for group, number in error.args[1]]
    return []
