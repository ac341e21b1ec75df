"""Builds the decode backend of ``rollout.backend``; auto is the fastest backend that agrees with training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ppo_ds.assemble.data import Inputs
from ppo_ds.config.checks.needs import check_needs
from ppo_ds.config.registry import import_target
from ppo_ds.config.schema import PPOConfig
from ppo_ds.config.types import replace
from ppo_ds.distributed.subgroup import Subgroup
from ppo_ds.distributed.world import World, seed_everything
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.rng import fork_rng
from ppo_ds.errors import UserError
from ppo_ds.models.size import shape_of
from ppo_ds.planning.forwards import old_logprobs_source, with_sources
from ppo_ds.planning.vllm_memory import engine_memory
from ppo_ds.ppo.health import PARITY_ROWS, Gap, ParityError, disagreement, parity_gap
from ppo_ds.rollout.base import Continuation, Generator, SamplingParams
from ppo_ds.rollout.keys import BACKENDS, VLLM
from ppo_ds.run.token_budgets import TokenBudget
from ppo_ds.tracking.banner import titled
from ppo_ds.types import Prompts, Rollout

# Largest mean and maximum gap, in nats per token, in the parity check at which algo.old_logprobs=auto takes
# the log-probs of generation; 1e-4 is a two-thousandth of a clipping range of 0.2.
SMALL_GAP = (1e-5, 1e-4)


@dataclass
class Backends:
    """Makes decode backends for the actor of a run, and measures their parity gaps.

    A parity gap is the difference between the log-probs of a backend and those of training.
    """

    config: PPOConfig
    world: World
    inputs: Inputs
    actor: HybridActor
    sampling: SamplingParams
    should_stop: Callable[[], bool]
    note: Callable[[str], None]
    made: dict[str, Generator] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        return self.inputs.longest_prompt + self.sampling.max_new_tokens

    def refusal(self, name: str) -> str | None:
        """Returns why a backend cannot decode the actor on some rank, or None. All ranks must call this."""
        target = BACKENDS[name].refusal
        if target is None:
            return None
        with self.actor.generation_mode():
            reason = import_target(target)(self.actor.lm, self.longest)
        return next((reason for reason in self.world.gather_objects(reason) if reason is not None), None)

    def make(self, name: str, token_budget: int) -> Generator:
        arguments: dict[str, Any] = {
            "lm": lambda: self.actor.lm,
            "tokenizer": self.inputs.tokenizer,
            "token_budget": token_budget,
            "lockstep_max": self.actor.lockstep_max,
            "should_stop": self.should_stop,
        }
        make = import_target(BACKENDS[name].generator)
        if not isinstance(self.config.rollout, VLLM):
            generator: Generator = make(**arguments)
            return generator
        # vLLM's engine starts slowly, and its cache keeps its size if a budget is halved, so it is made once
        if name not in self.made:
            arguments |= {"longest": self.longest, "temperature": self.sampling.temperature}
            engine = self.connected_engine(partial(make, **arguments, settings=self.config.rollout.vllm))
            if engine.merges_because:
                line = f"rollout.backend=vllm gets merged LoRA adapters: {engine.merges_because}"
                self.note(titled("warning", line))
            self.made[name] = engine
        return self.made[name]

    def connected_engine(self, start: Callable[..., Any]) -> Any:
        """Starts a decode backend that holds a copy of the weights, and connects the actor to it.

        All ranks must call this. ``start`` constructs the backend.
        """
        actor, world = self.actor, self.world
        lm, on_gpu = actor.module.lm, world.device.type == "cuda"
        memory = engine_memory(self.config, shape_of(lm), lm.dtype.itemsize, self.longest, on_gpu)
        assert memory is not None
        group = Subgroup(world, memory.group) if memory.group > 1 else None
        with fork_rng(world), actor.generation_mode():  # the start of an engine seeds all random generators
            engine = world.on_all(partial(start, kv_cache=memory.kv_cache, group=group))
        actor.connect(engine.loaded, adapters=engine.adapter_slot is not None)
        return engine

    def gap_of(self, name: str) -> Gap:
        """Makes a backend and returns its parity gap. Draws random numbers. All ranks must call this."""
        config, inputs, world = self.config, self.inputs, self.world
        self.made[name] = self.make(name, int(config.memory.rollout_tokens))
        # A backend may prefill a prompt once for several rows. The check covers this only if a prompt is
        # repeated, as it is in a step.
        repeats, n = min(config.rollout.samples_per_prompt, 2), len(inputs.source)
        prompts = inputs.source.batch([(world.rank + i // repeats) % n for i in range(PARITY_ROWS)])
        # sample the same tokens at each launch, independently of earlier random numbers
        seed_everything(config.run.seed + world.rank)
        return parity_gap(
            prompts,
            actor=self.actor,
            generator=self.made[name],
            sampling=self.sampling,
            token_budget=int(config.memory.score_tokens),
        )


def build_generator(
    config: PPOConfig,
    world: World,
    inputs: Inputs,
    actor: HybridActor,
    sampling: SamplingParams,
    should_stop: Callable[[], bool],
    note: Callable[[str], None],
) -> tuple[Generator, Gap, Callable[[int], Generator]]:
    """Returns the decode backend, its parity gap, and a function that rebuilds it with a new token budget.

    The backend stops generating once ``should_stop`` returns True. ``note`` receives banner lines on the
    chosen backend and the reason for this choice. All ranks must call this. Draws random numbers.
    """
    asked = config.rollout.backend
    backends = Backends(config, world, inputs, actor, sampling, should_stop, note)
    auto = [name for name, backend in BACKENDS.items() if backend.in_auto]
    choice = choose_backend(
        auto if asked == "auto" else (asked,),
        refusal=backends.refusal,
        gap_of=backends.gap_of,
        dtype=config.actor.model.dtype,
    )
    for line in choice.disagreeing:
        note(titled("warning", f"rollout.backend=auto passes over {line}"))
    why = "the fastest that agrees with training" if asked == "auto" else f"rollout.backend={asked}"
    reasons = "; ".join((why, *(f"not {line}" for line in choice.incapable)))
    note(titled("decode", f"{choice.backend}: {reasons}"))
    return backends.made[choice.backend], choice.gap, partial(backends.make, choice.backend)


def settle_old_logprobs(config: PPOConfig, gap: Gap, ranks: int) -> PPOConfig:
    """Replaces algo.old_logprobs=auto by rollout or recompute.

    It becomes rollout under four conditions: the actor computes in fp32; ``gap``, measured before the first
    step, is at most SMALL_GAP; rollout saves a forward before the update; no other key of algo or critic
    excludes rollout (config/checks/needs.py). Keys that may change on a resume do not affect the choice.
    """
    sources = with_sources(config)
    if len(sources) == 1:
        return sources[0]
    recompute, rollout = sources
    health = replace(config.health, max_parity="auto", parity_action="stop")
    agrees = all(found <= highest for found, highest in zip(gap, SMALL_GAP, strict=True))
    excluded = any(check_needs(replace(rollout, health=health), ranks))
    takes = agrees and old_logprobs_source(config) == "forward" and not excluded
    return rollout if takes else recompute


def rebuilt_on_change(
    generator: Generator, make: Callable[[int], Generator], budget: TokenBudget
) -> Generator:
    """Wraps ``generator``, which ``make(int(budget))`` replaces whenever the budget has changed."""
    current, tokens = [generator], int(budget)

    def generate(prompts: Prompts, sampling: SamplingParams, *continuation: Continuation) -> Rollout:
        nonlocal tokens
        if int(budget) != tokens:
            current.clear()  # frees the cache before the new backend allocates one
            tokens = int(budget)
            current.append(make(tokens))
        return current[0](prompts, sampling, *continuation)

    return generate


@dataclass(frozen=True)
class BackendChoice:
    """The chosen decode backend, and the reasons against the backends tried before."""

    backend: str
    gap: Gap  # its parity gap
    incapable: tuple[str, ...]  # backends that cannot decode this model, with the reasons
    disagreeing: tuple[str, ...]  # backends whose log-probs differ from those of training, with the gaps


def choose_backend(
    candidates: Sequence[str],
    *,
    refusal: Callable[[str], str | None],
    gap_of: Callable[[str], Gap],
    dtype: str,
) -> BackendChoice:
    """Returns the first candidate that can decode the model and agrees with training.

    The choice depends only on what does not change between launches, so a resumed run uses the same backend.
    Raises UserError if the last candidate cannot decode the model, ParityError if its gap is out of bounds.

    Args:
        refusal: Returns the reason why a backend cannot decode the model, or None. The same on every rank.
        gap_of: Returns the parity gap of a backend. The same on every rank; may be a collective.
    """
    incapable: list[str] = []
    disagreeing: list[str] = []
    for name in candidates:
        last, reason = name == candidates[-1], refusal(name)
        if reason is not None:
            if last:
                raise UserError(f"rollout.backend={name}: {reason}; use rollout.backend=auto")
            incapable.append(f"{name}: {reason}")
            continue
        gap = gap_of(name)
        wrong = disagreement(gap, dtype)
        if wrong is None:
            return BackendChoice(name, gap, tuple(incapable), tuple(disagreeing))
        if last:
            raise ParityError(
                f"{wrong}; rollout.backend={name} does not give the log-probs of the trained model: "
                "try another rollout.backend or actor.model.dtype=fp32, and report the model"
            )
        disagreeing.append(f"{name}: {wrong}")
    raise AssertionError("no candidates")
