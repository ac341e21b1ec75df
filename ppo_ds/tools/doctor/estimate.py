"""What a run takes in memory on one rank, phase by phase: a config and the shapes of its models in, bytes out. Nothing is loaded.

The sums are those of ops/memory.py; here stands who is in memory when. Phases are called as the trainer's time/* metrics call them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from ppo_ds.config.schema import ActorConfig, Config, CriticConfig, rollout_size
from ppo_ds.engine.hybrid import GATHER_ELEMENTS
from ppo_ds.engine.memory_budget import MemoryBudget, choose
from ppo_ds.ops.flops import causal_pairs, forward_flops
from ppo_ds.ops.linear_logprobs import CPU_BLOCK, GPU_BLOCK, KEPT
from ppo_ds.ops.memory import (
    BUCKET,
    FP32,
    PREFETCH,
    REUSE,
    Engine,
    Shape,
    decoding,
    head_backward,
    head_forward,
    kept_by_layers,
    passing,
    room_to_decode,
    trained_engine,
)
from ppo_ds.rollout.static import COLUMNS, PREFILL_TOKENS, whole_rows

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# beside tensors: the CUDA context, NCCL, kernels. A guess for H100s with torch 2.13, not measured
CONTEXT = 3 * 2**29
USABLE = 0.95  # of what is left: fragments between tensors


@dataclass(frozen=True)
class Frozen:
    """A model that only scores."""

    shape: Shape
    each: int  # bytes of a weight
    sharded: bool
    offloaded: bool

    def resting(self, ranks: int) -> int:
        return self.each * ceil(self.shape.parameters / (ranks if self.sharded else 1))


@dataclass(frozen=True)
class Models:
    """The shapes of all roles. What shares another's weights has none of its own here."""

    actor: Shape
    critic: Shape | None
    reference: Frozen | None
    rewards: Mapping[str, Frozen]  # by their config key
    reward_length: int  # tokens of the longest text that they read


@dataclass(frozen=True)
class Place:
    """Where it is to run."""

    ranks: int
    room: int | None  # bytes of a GPU; None: on CPUs

    @property
    def on_gpu(self) -> bool:
        return self.room is not None

    @property
    def usable(self) -> int | None:
        """Bytes for tensors."""
        return None if self.room is None else int((self.room - CONTEXT) * USABLE)


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank."""

    resting: dict[str, int]  # by role, on the device between two phases
    phases: dict[str, int]  # peaks, what rests included
    host: int  # in CPU memory: what is offloaded, on GPUs only
    engines: dict[str, Engine]
    generation: str  # how weights are there for decoding

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])


def estimate(config: Config, models: Models, place: Place, longest_prompt: int | None = None) -> Estimate:
    """``longest_prompt``: tokens; None: data.max_prompt_tokens."""
    return _Sum(config, models, place, longest_prompt or config.data.max_prompt_tokens)()


class _Sum:
    def __init__(self, config: Config, models: Models, place: Place, longest_prompt: int):
        self.config, self.models, self.place = config, models, place
        self.prompt, self.length = longest_prompt, longest_prompt + config.sampling.max_new_tokens
        self.rows = rollout_size(config) // place.ranks
        self.block = GPU_BLOCK if place.on_gpu else CPU_BLOCK
        self.engines = {"actor": self._engine(config.actor, models.actor, config.actor.model.dtype)}
        if models.critic is not None:
            self.engines["critic"] = self._engine(config.critic, models.critic, config.critic.model.dtype)

    def __call__(self) -> Estimate:
        resting = self._resting()
        rest = sum(resting.values())
        phases = {"loading": self._loading(), **{name: rest + more for name, more in self._scoring().items()}}
        generation, moved = self._generation(rest, phases)
        phases |= {name: rest + more for name, more in self._updates().items()}
        return Estimate(resting, phases, self._host() + moved, self.engines, generation)

    def _engine(self, role: ActorConfig | CriticConfig, shape: Shape, dtype: str) -> Engine:
        bucket = int(role.deepspeed.get("zero_optimization", {}).get("reduce_bucket_size", BUCKET))
        return trained_engine(
            shape,
            stage=role.zero.stage,
            each=BYTES[dtype],
            scaled=dtype == "fp16",
            ranks=self.place.ranks,
            offload_optimizer=role.zero.offload_optimizer,
            offload_params=role.zero.offload_params,
            # DeepSpeed asks for all of it, whatever the model's size: a GPU gives that, a CPU only what is written to
            bucket=bucket if self.place.on_gpu else min(bucket, shape.trained),
            separate_host=self.place.on_gpu,
        )

    # -- what stays ---------------------------------------------------------------------------------------------------------------------------

    def _frozen(self) -> dict[str, Frozen]:
        return ({"reference": self.models.reference} if self.models.reference else {}) | dict(
            self.models.rewards
        )

    def _resting(self) -> dict[str, int]:
        resting = {role: engine.resting for role, engine in self.engines.items()}
        resting |= {
            key: 0 if f.offloaded and self.place.on_gpu else f.resting(self.place.ranks)
            for key, f in self._frozen().items()
        }
        share = (
            self.models.actor.trained
            if self.config.actor.zero.stage == 0
            else ceil(self.models.actor.trained / self.place.ranks)
        )
        sets = {
            "ema": self.config.actor.ema.decay is not None,
            "lagged": self.config.algo.old_policy == "lagged",
        }
        return resting | {name: FP32 * share for name, kept in sets.items() if kept}

    def _host(self) -> int:
        if not self.place.on_gpu:
            return 0
        return sum(e.host for e in self.engines.values()) + sum(
            f.resting(self.place.ranks) for f in self._frozen().values() if f.offloaded
        )

    def _loading(self) -> int:
        """One model after the other. An engine below stage 3 copies the weights it trains into one flat tensor while the old ones are there."""
        there = peak = 0
        for role, engine in self.engines.items():
            zero, shape, each = self._zero(role)
            flat = each * (shape.trained if zero.stage in (1, 2) or (zero.stage == 0 and each < FP32) else 0)
            peak = max(peak, there + engine.weights + flat)
            there += engine.resting - engine.moments
        return max(
            peak,
            there
            + sum(
                f.resting(self.place.ranks)
                for f in self._frozen().values()
                if not (f.offloaded and self.place.on_gpu)
            ),
        )

    def _zero(self, role: str) -> tuple[Any, Shape, int]:
        if role == "actor":
            return self.config.actor.zero, self.models.actor, BYTES[self.config.actor.model.dtype]
        assert self.models.critic is not None
        return self.config.critic.zero, self.models.critic, BYTES[self.config.critic.model.dtype]

    # -- forwards -----------------------------------------------------------------------------------------------------------------------------

    def _places(self, budget: int, rows: int, length: int) -> int:
        """Of the largest forward: whole rows within the budget, at least one."""
        return length * max(1, min(budget // length, rows))

    def _scoring(self) -> dict[str, int]:
        budget, models = self.config.memory.score_tokens, self.models
        tokens = self._places(budget, self.rows, self.length)
        found = {}
        if models.rewards:
            text = self._places(budget, self.rows, models.reward_length)
            found["reward"] = max(
                self._frozen_forward(f, text, models.reward_length) for f in models.rewards.values()
            )
        # DeepSpeed gathers ahead once it has seen a few forwards alike: those of an update in between make it begin anew
        ahead = self.rows * self.length > 2 * tokens
        zero, shape, each = self._zero("actor")
        found["old_logprobs"] = self._forward(
            shape, tokens, self.length, each, self._gathered(shape, each, ahead) if zero.stage == 3 else 0
        )
        if models.reference is not None:
            found["ref_logprobs"] = self._frozen_forward(models.reference, tokens, self.length)
        if models.critic is not None:
            zero, shape, each = self._zero("critic")
            found["values"] = self._forward(
                shape, tokens, self.length, each, self._gathered(shape, each, ahead) if zero.stage == 3 else 0
            )
        return found

    def _frozen_forward(self, model: Frozen, tokens: int, length: int) -> int:
        arriving = model.resting(self.place.ranks) if model.offloaded and self.place.on_gpu else 0
        gathered = self._gathered(model.shape, model.each, ahead=True) if model.sharded else 0
        return arriving + self._forward(model.shape, tokens, length, model.each, gathered)

    def _forward(self, shape: Shape, tokens: int, length: int, each: int, gathered: int) -> int:
        """Of one that keeps nothing."""
        head = head_forward(shape, self._asked(tokens), each, self.block) if shape.head else 0
        return gathered + max(passing(shape, tokens, length, each), head)

    def _gathered(self, shape: Shape, each: int, ahead: bool) -> int:
        """ZeRO-3's, in a forward: a layer's largest tensor twice for a moment, as it is put together; or ``ahead`` all that comes next."""
        return each * min(2 * shape.parameters, (2 * PREFETCH if ahead else 0) + 2 * shape.tensor)

    def _asked(self, tokens: int) -> int:
        """Places of answers, of all in a forward."""
        return ceil(tokens * self.config.sampling.max_new_tokens / self.length)

    # -- generation ---------------------------------------------------------------------------------------------------------------------------

    def _generation(self, rest: int, phases: dict[str, int]) -> tuple[str, int]:
        """Adds the phases of generation; how weights are there for it, and bytes of states that wait in CPU memory meanwhile."""
        zero, shape, each = self._zero("actor")
        memory, sharded, weights = self.config.memory, zero.stage == 3, each * shape.parameters
        slots = max(1, min(memory.rollout_tokens // self.length, whole_rows(self.rows)))
        length = -(-self.length // COLUMNS) * COLUMNS
        prompts = min(slots, ceil(self.rows / self.config.rollout.samples_per_prompt))
        prefill = min(max(min(memory.rollout_tokens, PREFILL_TOKENS), self.prompt), prompts * self.prompt)
        decode = decoding(
            shape,
            tokens=slots * length,
            length=length,
            rows=slots,
            prefill=prefill,
            waiting=self.rows > slots,
            each=each,
        )
        asked = min(memory.rollout_tokens, self.rows * self.length)
        idle = sum(
            e.masters + e.moments + (e.buffers if self._zero(role)[0].stage == 3 else 0)
            for role, e in self.engines.items()
        )
        room = MemoryBudget(
            free=2**62 if self.place.usable is None else max(0, self.place.usable - rest),
            weights=weights if sharded else 0,
            layer=min(weights, each * REUSE) if sharded else 0,
            decoding=room_to_decode(
                shape, asked, min(self.rows, max(1, asked // self.config.sampling.max_new_tokens)), each
            ),
            idle=idle,
        )
        choice = choose(
            room,
            generate=zero.generation_gather,
            offload_states=zero.offload_states,
            on_gpu=self.place.on_gpu,
        )
        there = rest - (idle if choice.states_away and self.place.on_gpu else 0)
        gathered = 0 if not sharded else weights if choice.whole else self._gathered(shape, each, ahead=True)
        if sharded and choice.whole:
            phases["switch"] = there + weights + each * min(shape.parameters, GATHER_ELEMENTS + shape.tensor)
        phases["generate"] = there + gathered + decode
        how = (
            "weights whole on each rank"
            if not sharded
            else "weights gathered once"
            if choice.whole
            else "weights gathered layer by layer"
        )
        return how + (
            "; optimizer states make way" if choice.states_away else ""
        ), idle if choice.states_away and self.place.on_gpu else 0

    # -- updates ------------------------------------------------------------------------------------------------------------------------------

    def _updates(self) -> dict[str, int]:
        """Of each model the most of three moments: the largest micro-batch's backward begins, the last one ends, the optimizer steps.

        Both backwards come before both steps (ppo/learner.py): what the actor's has left waits while the critic's runs, and the other way about.
        """
        actor, critic = self.engines["actor"], self.engines.get("critic")
        found = {
            "update_actor": max(
                self._backward("actor"), actor.gradients + actor.step + (critic.gradients if critic else 0)
            )
        }
        if critic is not None:
            found["update_critic"] = max(
                actor.gradients + self._backward("critic"), critic.gradients + critic.step
            )
        return found

    def _backward(self, role: str) -> int:
        engine, (_, shape, each), config = self.engines[role], self._zero(role), self.config
        model = config.actor.model if role == "actor" else config.critic.model
        rows = (config.algo.minibatch_size or rollout_size(config)) // self.place.ranks
        tokens = self._places(config.memory.train_tokens, rows, self.length)
        asked = self._asked(tokens)
        kept = kept_by_layers(shape, tokens, self.length, each, bool(model.gradient_checkpointing))
        head = (
            head_backward(shape, asked, each, self.block, KEPT)
            if shape.head
            else 2 * FP32 * shape.hidden * asked
        )
        before = engine.gradients if rows * self.length > tokens else 0
        return max(
            engine.gathered + kept + head + engine.bucket + before,
            engine.gradients + engine.bucket + engine.last,
        )


def step_flops(config: Config, models: Models, longest_prompt: int | None = None) -> int:
    """Of one PPO step over all ranks, were every prompt and every answer as long as can be: the forwards of all, and the backwards of the updates at
    twice a forward (a third one where activations are computed again)."""
    prompt = longest_prompt or config.data.max_prompt_tokens
    rows, answer = rollout_size(config), config.sampling.max_new_tokens
    length = prompt + answer

    def forward(shape: Shape) -> int:
        return forward_flops(shape.size, rows * length, rows * causal_pairs([length]), rows * answer)

    trained = [(models.actor, config.actor.model)] + (
        [(models.critic, config.critic.model)] if models.critic else []
    )
    frozen = [model.shape for model in (models.reference, *models.rewards.values()) if model is not None]
    updates = (
        sum(forward(shape) * (4 if model.gradient_checkpointing else 3) for shape, model in trained)
        * config.algo.epochs
    )
    return (
        forward(models.actor)
        + sum(forward(shape) for shape in (*(shape for shape, _ in trained), *frozen))
        + updates
    )
