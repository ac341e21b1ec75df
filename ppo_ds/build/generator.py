"""The `rollout.backend` key to what decodes: the backend that it names, or with `auto` the fastest that agrees with training."""

from __future__ import annotations

from collections.abc import Callable

from ppo_ds.build.backend_choice import choose
from ppo_ds.build.data import Inputs
from ppo_ds.config.schema import Config
from ppo_ds.distributed.world import World, seed_everything
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.ppo.parity import GATE_PROMPTS, Gap, parity_gap
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.rollout.decoding import can_decode
from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.rollout.static import StaticGenerator
from ppo_ds.tracking.banner import titled

FASTEST_FIRST = ("static", "hf")  # as measured


def build_generator(
    config: Config,
    world: World,
    inputs: Inputs,
    actor: HybridActor,
    sampling: SamplingParams,
    stopped: Callable[[], bool],
    note: Callable[[str], None],
) -> tuple[Generator, Gap]:
    """Returns the decode backend, which ends early once ``stopped``, and its gap in the parity gate.

    Notes which backend it is and why. A collective; draws random numbers.
    """
    asked, made = config.rollout.backend, _backends(config, inputs, actor, stopped)
    choice = choose(
        FASTEST_FIRST if asked == "auto" else (asked,),
        refusal=lambda name: _refusal(name, world, actor, inputs.longest_prompt + sampling.max_new_tokens),
        gap_of=_gate(config, world, inputs, actor, sampling, made),
        dtype=config.actor.model.dtype,
    )
    for line in choice.unfit:
        note(titled("warning", f"rollout.backend=auto passes over {line}"))
    why = "the fastest that agrees with training" if asked == "auto" else f"rollout.backend={asked}"
    note(
        titled(
            "decode", f"{choice.backend}: {'; '.join((why, *(f'not {line}' for line in choice.incapable)))}"
        )
    )
    return made[choice.backend], choice.gap


def _backends(
    config: Config, inputs: Inputs, actor: HybridActor, stopped: Callable[[], bool]
) -> dict[str, Generator]:
    common = {"tokenizer": inputs.tokenizer, "token_budget": config.memory.rollout_tokens, "stopped": stopped}
    return {
        "static": StaticGenerator(lambda: actor.lm, agree=actor.all_reduce_max, **common),
        "hf": HFGenerator(lambda: actor.lm, agree=actor.all_reduce_max, **common),
    }


def _gate(
    config: Config,
    world: World,
    inputs: Inputs,
    actor: HybridActor,
    sampling: SamplingParams,
    made: dict[str, Generator],
) -> Callable[[str], Gap]:
    """Each prompt twice in a row where a step has several answers to it: a backend may read the prompt of such rows once."""
    each = min(config.rollout.samples_per_prompt, 2)
    few = inputs.source.batch([(world.rank + i // each) % len(inputs.source) for i in range(GATE_PROMPTS)])

    def gap(name: str) -> Gap:
        seed_everything(
            config.run.seed + world.rank
        )  # the same tokens at each start, whatever was drawn before
        return parity_gap(
            few, actor=actor, generator=made[name], sampling=sampling, token_budget=config.memory.score_tokens
        )

    return gap


def _refusal(name: str, world: World, actor: HybridActor, longest: int) -> str | None:
    """Why a backend cannot decode this model, or not so, on any rank; None where it can. ``longest``: of the sequences. A collective."""
    if name == "hf":
        return None
    with actor.generation_mode():
        reason = can_decode(actor.lm, longest)
    return next((said for said in world.gather_objects(reason) if said is not None), None)
