"""The blocks two and eight: checks of several GPUs on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.checks import judges
from benchmarks.checks.one_gpu import TINY, estimates, resume, waits
from benchmarks.checks.runs import (
    Check,
    Fault,
    doctor_run,
    prepare_run,
    step_run,
    train_run,
    varied,
    with_environment,
)

# The same responses on any number of ranks, and one optimizer step for all of them. The second step shows
# that the first one has changed all models alike.
GREEDY = ("sampling.top_k=1", "actor.optim.lr=1e-4", "critic.optim.lr=1e-4")
ONE_UPDATE = ["--passes", "1", "--minibatches", "1"]
# keeps no small weights whole, so that tiny models are sharded as well
ALL_SHARDED = tuple(
    f"+{role}.deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
    for role in ("actor", "critic")
)
ZERO_3 = ("zero=stage3", *ALL_SHARDED)
LAYERS = (*ZERO_3, "actor.zero.generation_gather=layers")
BF16_LIMIT = 0.03  # of gradients in bf16, for the same responses
GRADIENT_LIMIT = 0.01  # of gradients in fp32; those of the seeds differ by much more


def two_gpu_checks(tiny: bool) -> dict[str, Check]:
    """Returns the checks of two ranks; ``tiny`` uses dry workloads."""
    size = TINY if tiny else []
    straight = train_run("straight", "greedy", size, *GREEDY, *ZERO_3, ranks=2, minutes=2.0)
    fewer = train_run(
        "fewer", "fewer", size, *GREEDY, *ZERO_3, "run.resume={out}/greedy/checkpoints/step_000002"
    )
    return {
        "ranks": ranks_agree(size),
        "gather": gather(size),
        "sequence": sequence(size),
        "waits_two": waits("two", 2, *ZERO_3),
        "killed": killed(size),
        "resume_two": resume("two", size, *ZERO_3, new_tokens=4 if tiny else 64, ranks=2),
        "resume_ranks": Check(
            "two",
            "Does a run of two ranks go on with the same gradients on one?",
            [prepare_run("W1", size), straight, fewer],
            judges.resumed_gradients(GRADIENT_LIMIT),
            [Fault("weights are lost", [varied(fewer, "lost_weights")])],
        ),
    }


def ranks_agree(size: Sequence[str]) -> Check:
    settings = {f"stage{stage}": (f"zero=stage{stage}", *ALL_SHARDED * (stage == 3)) for stage in range(4)}
    settings["optimizer"] = (
        "zero=stage2",
        "actor.zero.offload_optimizer=true",
        "critic.zero.offload_optimizer=true",
    )
    settings["offload"] = (
        "zero=stage3_offload",
        *ALL_SHARDED,
        "actor.zero.offload_params=true",
        "critic.zero.offload_params=true",
    )
    options = [*size, *ONE_UPDATE]
    one = step_run("one", "W1", *GREEDY, options=options, minutes=1.2)
    runs = {
        name: step_run(name, "W1", *GREEDY, *how, options=options, ranks=2) for name, how in settings.items()
    }
    return Check(
        "two",
        "Do one and two ranks have the same gradients, with ZeRO 0 to 3 and offloading?",
        [one, *runs.values()],
        judges.same_gradients(GRADIENT_LIMIT),
        [
            Fault("rank 1 is not heard", [varied(runs["stage2"], "silent_rank")]),
            Fault("offloaded gradients are wrong", [varied(runs["offload"], "scaled_loss")]),
        ],
    )


def gather(size: Sequence[str]) -> Check:
    whole, layers = (
        step_run(name, "W1", *GREEDY, *how, options=size, ranks=2, minutes=2.0)
        for name, how in (("whole", ZERO_3), ("layers", LAYERS))
    )
    return Check(
        "two",
        "Does generation with ZeRO-3 use the trained weights, gathered whole and layer by layer?",
        [whole, layers],
        judges.all_of(judges.parity_below(1e-3), judges.same_gradients(GRADIENT_LIMIT, slice(1))),
        [
            Fault(f"{run.name}: log-probs are wrong", [varied(run, "wrong_logprobs")])
            for run in (whole, layers)
        ],
    )


def sequence(size: Sequence[str]) -> Check:
    one, divided = (
        step_run(name, "W3", *GREEDY, *ZERO_3, *how, options=[*size, *ONE_UPDATE], ranks=2, minutes=1.9)
        for name, how in (("one", ()), ("divided", ("memory.sequence_parallel=2",)))
    )
    return Check(
        "two",
        "Do two ranks that divide the tokens of each row have the same gradients?",
        [one, divided],
        judges.same_gradients(BF16_LIMIT),
        [Fault("the tokens of rank 1 are lost", [varied(divided, "silent_rank")])],
    )


def killed(size: Sequence[str]) -> Check:
    whole, dies = (
        train_run(name, name, size, "zero=stage2", ranks=2, minutes=3.0) for name in ("whole", "killed")
    )
    kill = replace(with_environment(dies, PPO_DS_FAULT="kill@update:rank=1:at=2"), codes=(1,))
    return Check(
        "two",
        "Does a run whose rank 1 is killed end soon, with one line?",
        [prepare_run("W1", size), whole, kill],
        judges.ended_together,
        [Fault("no watchdog", [varied(kill, "no_watchdog")]), Fault("no rank is killed", [dies])],
    )


def eight_gpu_checks(tiny: bool) -> dict[str, Check]:
    """Returns the checks of eight ranks; ``tiny`` uses dry workloads, two ranks, and four for hpZ."""
    size, ranks = (TINY, 2) if tiny else ([], 8)
    return {
        "ranks_eight": ranks_agree_on_eight(size, ranks),
        "scaling": scaling(size, ranks, 0.2 if tiny else 0.7),
        "seven_b": seven_b(size, ranks, tiny),
    }


def ranks_agree_on_eight(size: Sequence[str], ranks: int) -> Check:
    options = [*size, *ONE_UPDATE]
    hpz_ranks = max(4, ranks)
    hpz = tuple(
        f"+{role}.deepspeed.zero_optimization.zero_hpz_partition_size={hpz_ranks // 2}"
        for role in ("actor", "critic")
    )
    copies = step_run("hpz", "W1", *GREEDY, *ZERO_3, *hpz, options=options, ranks=hpz_ranks, minutes=2.0)
    return Check(
        "eight",
        "Do one and all ranks have the same gradients, with ZeRO-3, hpZ and generation by layers?",
        [
            step_run("one", "W1", *GREEDY, options=options),
            step_run("stage3", "W1", *GREEDY, *ZERO_3, options=options, ranks=ranks, minutes=2.0),
            step_run("layers", "W1", *GREEDY, *LAYERS, options=options, ranks=ranks, minutes=2.0),
            copies,
        ],
        judges.all_of(judges.same_gradients(GRADIENT_LIMIT), judges.parity_below(1e-3)),
        [Fault("rank 1 is not heard", [varied(copies, "silent_rank")])],
    )


def scaling(size: Sequence[str], ranks: int, low: float) -> Check:
    each = 8 if size else 64
    one, all_ranks = (
        step_run(
            name,
            "W3",
            "zero=stage1",
            steps=2,
            options=[*size, "--prompts", str(count * each)],
            folder=f"W3_{count * each}",
            ranks=count,
            minutes=4.0,
        )
        for name, count in (("one", 1), ("all", ranks))
    )
    slow = with_environment(all_ranks, PPO_DS_FAULT="slow@update:rank=1:times=0:seconds=30")
    return Check(
        "eight",
        "What is the efficiency of all ranks, with the same samples for each?",
        [one, all_ranks],
        judges.efficiency(ranks, low),
        [Fault("a slow rank", [slow])],
    )


def seven_b(size: Sequence[str], ranks: int, tiny: bool) -> Check:
    settings = (*ZERO_3, "sampling.max_new_tokens=128") if not tiny else ZERO_3
    paths = {
        "whole": (),
        "layers": ("actor.zero.generation_gather=layers",),
        "lora": ("actor.lora.rank=8", "critic.lora.rank=8"),
    }
    runs = {
        name: step_run(name, "W5", *settings, *how, options=size, ranks=ranks, minutes=4.0)
        for name, how in paths.items()
    }
    return Check(
        "eight",
        "Does a model of 7B parameters train with ZeRO-3? Is the doctor's estimate of memory right?",
        [
            prepare_run("W5", size, minutes=9.0),
            *runs.values(),
            doctor_run("W5", size, *settings, gpus=ranks, on_cpu=tiny),
        ],
        judges.all_of(
            judges.parity_below(0.04, *paths),
            judges.memory_estimate("whole", *((1e-4, 1.33) if tiny else (0.9, 1.33))),
        ),
        [Fault("log-probs are wrong", [varied(runs["layers"], "wrong_logprobs")]), *estimates()],
    )
