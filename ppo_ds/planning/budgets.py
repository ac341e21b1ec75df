"""Resolves the token budgets of the config section memory that are ``auto``.

A run and the doctor compute budgets in the same way. A budget is the largest number, up to a limit, with
which each of its PHASES fits into the usable memory by the estimate of ppo_memory.py or finetune_memory.py.
On a GPU, the run measures this memory after it has loaded the models, and the doctor uses the memory given by
``--gpu-mem``. On a CPU both use the machine's total memory, so that every launch computes the same numbers.

A run that resumes on the same number of ranks uses the checkpoint's numbers, since micro-batches of another
size round differently. If memory runs out with a budget, half of the budget is recorded in the file
memory.json of the run directory, which overrides the checkpoint.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ppo_ds.compute.sizes import Shape
from ppo_ds.config.schema import Config, ConfigT, PPOConfig, TextConfig
from ppo_ds.config.types import replace
from ppo_ds.distributed.world import World
from ppo_ds.engine.memory_budget import format_bytes, tensor_memory
from ppo_ds.planning.model_memory import decode_bytes_bound, inference_activation_bytes, logit_bytes
from ppo_ds.planning.ppo_memory import packed_bytes, records_steps
from ppo_ds.planning.run_memory import BYTES, USABLE, Estimate, Hardware
from ppo_ds.rollout.continuous_batch import PREFILL_TOKENS
from ppo_ds.run.stage import RunContext
from ppo_ds.run.token_budgets import OnChange, TokenBudget, TokenBudgets
from ppo_ds.storage.drafts import write_file
from ppo_ds.storage.reading import read_json
from ppo_ds.tracking.banner import titled

RECORD = "memory.json"
STEP = 1024  # budgets below the limit are multiples of this
# Upper limits. On a CPU, a larger forward is not faster.
CPU_LIMITS = {"rollout_tokens": 32768, "score_tokens": 16384, "train_tokens": 8192}
# On a GPU, a forward of this many tokens takes a second on a 7B model and 0.1 s on a 0.5B model, so launching
# kernels, and with ZeRO-3 gathering weights, take at most a few percent of the time. Forwards and backwards
# with gradients take three times as long.
GPU_LIMITS = {"score_tokens": 65536, "train_tokens": 32768}
# An H100 can compute about 300 FLOPs per byte that it reads. With more than about 300 rows, a decode step is
# therefore limited by arithmetic, and more rows only make it longer.
MAX_DECODED_ROWS = 512
PHASES = {  # budget -> phases whose memory it determines
    "rollout_tokens": ("switch", "generate"),
    "score_tokens": ("reward", "old_logprobs", "ref_logprobs", "values", "eval"),
    "train_tokens": ("update_actor", "update_critic", "update_scorer"),
}


def used_budgets(config: Config) -> dict[str, Any]:
    """Returns the budgets that the stage uses by name, each a number or auto."""
    keys = dict(config.memory) if isinstance(config, TextConfig) else {}
    return {name: keys[name] for name in PHASES if name in keys}


def automatic(config: Config) -> list[str]:
    """Returns the names of the budgets that the stage uses and that are auto."""
    return [name for name, tokens in used_budgets(config).items() if tokens == "auto"]


def with_numbers(config: ConfigT, numbers: Mapping[str, int]) -> ConfigT:
    """Returns a copy of the config in which the values in ``numbers`` replace the token budgets."""
    if not numbers or not isinstance(config, TextConfig):
        return config
    return replace(config, memory=replace(config.memory, **numbers))


def with_cpu_limits(config: ConfigT) -> ConfigT:
    """Returns a copy of the config in which each auto budget is replaced by its upper limit on a CPU."""
    return with_numbers(config, {name: CPU_LIMITS[name] for name in automatic(config)})


# ---- arithmetic


@dataclass(frozen=True)
class Resolution:
    """Token budgets that were auto, and lines for the start-up banner that show how they were computed."""

    numbers: dict[str, int]
    lines: list[str]


def resolve(
    config: ConfigT, estimate: Callable[[ConfigT], Estimate], usable: int, on_gpu: bool
) -> Resolution:
    """Computes the budgets that are auto.

    ``estimate`` is called with configs in which each budget is a number. The tensors of a rank may take at
    most ``usable`` bytes together.
    """
    start = with_cpu_limits(config)
    base = estimate(start)
    resident = sum(base.resident.values())
    decoded = min(base.rows, MAX_DECODED_ROWS) * base.row_tokens
    limits = CPU_LIMITS
    if on_gpu:
        limits = GPU_LIMITS | {"rollout_tokens": max(CPU_LIMITS["rollout_tokens"], decoded)}
    numbers, lines = {}, []
    for name in automatic(config):

        def trial(tokens: int, name: str = name) -> Estimate:
            return estimate(with_numbers(start, {name: tokens}))

        def fits(tokens: int, name: str = name) -> bool:
            # a larger batch must not make generation offload states or gather weights layer by layer
            same = tokens <= CPU_LIMITS[name] or trial(tokens).generation == base.generation
            return same and highest_phase(name, trial(tokens))[1] <= usable

        numbers[name] = tokens = largest(limits[name], base.row_tokens, fits)
        found, one_row = trial(tokens), trial(base.row_tokens)
        phase, peak = highest_phase(name, found)
        text = f"{name}={tokens}"
        if phase:
            offloaded = found.moved if name == "rollout_tokens" else 0
            text += f": {phase} takes {format_bytes(peak - resident + offloaded)}"
            text += f" after offloading {format_bytes(offloaded)}" if offloaded else ""
        if tokens == limits[name]:
            text += "; a larger number is not faster"
        elif not fits(tokens):
            text += "; this is one row, and by the estimate it does not fit"
        elif tokens > base.row_tokens and found.generation == one_row.generation:
            more = peak - highest_phase(name, one_row)[1]
            text += f", {more / (tokens - base.row_tokens) / 2**10:,.0f} KiB per token beyond one row"
        lines.append(titled("memory", text))
    if numbers:
        left, total, held = map(format_bytes, (max(0, usable - resident), usable, resident))
        kinds = ["weights", "optimizer states", "gradient buffers", *(["vLLM"] if base.vllm else [])]
        held += f" of {', '.join(kinds[:-1])} and {kinds[-1]}"
        lines.insert(0, titled("memory", f"{left} per rank for a phase: {total} usable - {held}"))
    return Resolution(numbers, lines)


def highest_phase(name: str, found: Estimate) -> tuple[str, int]:
    """Returns (phase, peak) of the highest of a budget's PHASES; ("", 0) if ``found`` has none of them."""
    peaks = ((phase, found.phases[phase]) for phase in PHASES[name] if phase in found.phases)
    return max(peaks, key=lambda item: item[1], default=("", 0))


def largest(limit: int, row_tokens: int, fits: Callable[[int], bool]) -> int:
    """Returns ``limit`` if it fits, else the largest multiple of STEP below ``limit`` that fits.

    If none fits, returns ``row_tokens``, the tokens of the longest row, but at most ``limit``.
    """
    if fits(limit):
        return limit
    count = bisect_left(range(STEP, limit, STEP), True, key=lambda tokens: not fits(tokens))
    return STEP * count or min(limit, row_tokens)


# ---- in launch/evaluate.py


def largest_decoding(config: PPOConfig, world: World, policy: Shape, row_tokens: int, rows: int) -> int:
    """Returns the token budget for decoding with a policy that is in memory. All ranks must call this.

    At most ``rows`` responses are decoded at a time; ``row_tokens`` is the length of the longest row.
    """
    each, on_gpu = BYTES[config.actor.model.dtype], world.device.type == "cuda"
    weights = policy.weight_bytes(each)
    usable = int(USABLE * tensor_memory(world, weights)) - weights - packed_bytes(config, policy, on_gpu)
    logit = logit_bytes(each, on_gpu, config.sampling.top_k, config.sampling.top_p)
    recorded = records_steps(config, on_gpu)

    def fits(tokens: int) -> bool:
        decoded = max(1, min(rows, tokens // row_tokens))
        prefill = None if config.rollout.backend == "hf" else min(tokens, PREFILL_TOKENS)
        tokens = decoded * row_tokens
        return decode_bytes_bound(policy, tokens, decoded, each, logit, prefill, recorded) <= usable

    limit = CPU_LIMITS["rollout_tokens"]
    if on_gpu:
        limit = max(limit, min(rows, MAX_DECODED_ROWS) * row_tokens)
    return largest(limit, row_tokens, fits)


def largest_scoring(world: World, models: Sequence[tuple[Shape | None, str]], row_tokens: int) -> int:
    """Returns the token budget for scoring with reward models that are in memory. All ranks must call this.

    ``models`` are shapes and dtypes; a shape that is None is not counted. ``row_tokens`` is the length of the
    longest row.
    """
    known = [(shape, BYTES[dtype]) for shape, dtype in models if shape is not None]
    weights = sum(shape.weight_bytes(each) for shape, each in known)
    usable = int(USABLE * tensor_memory(world, weights)) - weights

    def fits(tokens: int) -> bool:
        rows = max(1, tokens // row_tokens)
        return all(
            inference_activation_bytes(shape, rows * row_tokens, row_tokens, each) <= usable
            for shape, each in known
        )

    limits = GPU_LIMITS if world.device.type == "cuda" else CPU_LIMITS
    return largest(limits["score_tokens"], row_tokens, fits)


# ---- in a run


def settle(
    config: ConfigT, context: RunContext, estimate: Callable[[ConfigT, Hardware], Estimate]
) -> ConfigT:
    """Resolves the budgets of a run that are auto, and returns the config with the numbers.

    All ranks must call this once all models are in memory. ``estimate`` estimates the memory of the run.
    """
    if not automatic(config):
        return config
    world, on_gpu = context.world, context.world.device.type == "cuda"
    hardware = Hardware(world.size, 2**62 if on_gpu else None)
    held = estimate(with_cpu_limits(config), hardware).resident
    resident = sum(held.values()) - held.get("vllm", 0)  # the engine of vLLM does not exist yet
    tensors = tensor_memory(world, resident)
    if on_gpu:
        hardware = Hardware.measured(world.size, tensors)
    found = resolve(config, lambda trial: estimate(trial, hardware), int(USABLE * tensors), on_gpu)
    context.budgets.set(found.numbers)
    context.banner.note(*found.lines)
    return with_numbers(config, found.numbers)


def known_budgets(
    config: Config, run_dir: Path, checkpoint: Mapping[str, Any] | None, ranks: int
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Returns the budgets that earlier launches of the run have determined, by name.

    The second result maps each budget that was halved, because memory ran out, to its number before that. The
    third is lines for the start-up banner. A number in the config takes precedence, unless memory ran out
    with it. ``checkpoint`` is the section memory of a checkpoint with the same number of ``ranks``, or None.
    """
    numbers: dict[str, int] = {}
    halved_from: dict[str, int] = {}
    sources: dict[str, str] = {}
    for name in automatic(config):
        if isinstance(tokens := (checkpoint or {}).get(name), int):
            numbers[name], sources[name] = tokens, "from the checkpoint"
    for name, entry in read_record(run_dir).items():
        if name not in (used := used_budgets(config)):
            continue
        given = numbers.get(name, used[name])
        if entry["ranks"] == ranks and given in ("auto", entry["before"], entry["tokens"]):
            numbers[name], halved_from[name] = entry["tokens"], entry["before"]
            sources[name] = f"an earlier start ran out of memory with {entry['before']} ({run_dir / RECORD})"
    lines = [titled("memory", f"{name}={numbers[name]}: {source}") for name, source in sources.items()]
    return numbers, halved_from, lines


def token_budgets(
    config: Config, world: World, run_dir: Path, halved_from: Mapping[str, int], on_change: OnChange
) -> TokenBudgets:
    """Makes the budgets of a run. Until ``settle`` is called, auto budgets have the upper limit for CPUs.

    ``halved_from`` is the second result of ``known_budgets``; TokenBudgets describes ``on_change``.
    """
    given = {name: tokens for name, tokens in used_budgets(config).items() if tokens != "auto"}

    def budget(name: str) -> TokenBudget:
        return TokenBudget(name, given.get(name, CPU_LIMITS[name]), halved_from.get(name))

    return TokenBudgets(
        rollout=budget("rollout_tokens"),
        score=budget("score_tokens"),
        train=budget("train_tokens"),
        world=world,
        record=partial(write_record, run_dir, ranks=world.size),
        on_change=on_change,
    )


def read_record(run_dir: Path) -> dict[str, dict[str, int]]:
    """Returns the budgets recorded in earlier launches; {} if the file is missing or damaged."""
    try:
        found = read_json(run_dir / RECORD)
        return {
            name: {key: max(1, int(found[name][key])) for key in ("before", "tokens", "ranks")}
            for name in PHASES
            if name in found
        }
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def write_record(run_dir: Path, budget: TokenBudget, *, ranks: int) -> None:
    """Records a budget that was halved, and the number of ``ranks`` to which it applies, in ``run_dir``."""
    entry = {"before": budget.halved_from, "tokens": budget.tokens, "ranks": ranks}
    found = read_record(run_dir) | {budget.name: entry}
    write_file(run_dir / RECORD, json.dumps(found, indent=2) + "\n")
