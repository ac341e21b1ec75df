"""Estimates the memory of a PPO run on one rank, by phase, from the config and the shapes of the models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch

from ppo_ds.compute import matmul
from ppo_ds.compute.sizes import Shape
from ppo_ds.config.schema import PPOConfig, decoded_rows, rollout_size
from ppo_ds.engine.gather import GATHER_ELEMENTS
from ppo_ds.engine.memory_budget import GenerationPlan, MemoryBudget, plan_generation
from ppo_ds.models.linear import pays
from ppo_ds.models.loading import torch_dtype
from ppo_ds.planning.forwards import kept_roles, with_sources
from ppo_ds.planning.model_memory import REUSE, decode_bytes_bound, logit_bytes, static_decode_bytes
from ppo_ds.planning.run_memory import (
    Estimate,
    FrozenModel,
    Hardware,
    RunMemory,
    forward_tokens,
    gathered_bytes,
)
from ppo_ds.planning.vllm_memory import VllmMemory, engine_memory, synced_bytes
from ppo_ds.rollout.continuous_batch import COLUMNS, PREFILL_TOKENS, fast_batch_size
from ppo_ds.rollout.graphs import KEPT_GRAPHS

# Executable CUDA graph of a decode step, without its tensors: 6 to 28 MiB according to vLLM's pull requests
# 11349 and 22897.
GRAPH = 28 * 2**20


@dataclass(frozen=True)
class Models:
    """The shapes of all roles. A role that shares another role's weights has no entry."""

    actor: Shape
    critic: Shape | None
    reference: FrozenModel | None
    rewards: Mapping[str, FrozenModel]  # by their config key
    reward_length: int  # tokens of the longest text that the reward models read


def estimate(
    config: PPOConfig, models: Models, hardware: Hardware, longest_prompt: int | None = None
) -> Estimate:
    """Estimates the memory of one rank.

    ``longest_prompt`` is the longest prompt's number of tokens; None means data.max_prompt_tokens.
    """
    return PPOMemory(config, models, hardware, longest_prompt or config.data.max_prompt_tokens).estimate()


class PPOMemory(RunMemory):
    """Computes the estimate of a PPO run."""

    config: PPOConfig

    def __init__(self, config: PPOConfig, models: Models, hardware: Hardware, longest_prompt: int):
        frozen = {} if models.reference is None else {"reference": models.reference}
        super().__init__(
            config,
            hardware,
            {"actor": models.actor} | ({} if models.critic is None else {"critic": models.critic}),
            frozen | dict(models.rewards),
            length=longest_prompt + config.sampling.max_new_tokens,
            rows=(config.algo.minibatch_size or rollout_size(config)) // hardware.ranks,
        )
        self.models, self.prompt = models, longest_prompt
        self.rows = rollout_size(config) // hardware.ranks
        self.decoded = decoded_rows(config, hardware.ranks)
        _, shape, each = self._role("actor")
        self.vllm = engine_memory(config, shape, each, self.length, hardware.on_gpu)

    def estimate(self) -> Estimate:
        ranks, on_gpu = self.hardware.ranks, self.hardware.on_gpu
        resident = {role: engine.resident for role, engine in self.engines.items()}
        host = sum(engine.host for engine in self.engines.values()) if on_gpu else 0
        for key, model in self.frozen.items():
            offloaded = model.offloaded and on_gpu
            resident[key] = 0 if offloaded else model.resident(ranks)
            host += model.host(ranks) if on_gpu else 0
        resident |= self.averages()
        if self.config.algo.old_policy == "lagged":
            resident["lagged"] = self.copy_of("actor")
        if self.vllm is not None:
            resident["vllm"] = self.vllm.between
            host += self.vllm.host if on_gpu else 0
        rest = sum(resident.values())
        phases = {"loading": self.loading()}
        phases |= {name: rest + more for name, more in self._scoring().items()}
        generation, layerwise, moved = self._generation(rest, phases)
        phases |= {name: rest + more for name, more in self._updates().items()}
        return Estimate(
            resident,
            phases,
            host + moved,
            self.engines,
            generation,
            layerwise,
            moved,
            row_tokens=self.length,
            rows=self.rows,
            vllm=self.vllm,
        )

    # -- scoring -------------------------------------------------------------------------------------------

    def _scoring(self) -> dict[str, int]:
        budget, models = int(self.config.memory.score_tokens), self.models
        tokens = self.forward_tokens(budget, self.rows)
        peaks = {}
        if models.rewards:
            text = forward_tokens(budget, self.rows, models.reward_length)
            peaks["reward"] = max(
                self._frozen_forward(model, text, models.reward_length) for model in models.rewards.values()
            )
        # DeepSpeed prefetches after a few equal forwards in a row; an update in between resets that count
        prefetch = self.rows * self.length > 2 * tokens
        peaks["old_logprobs"] = self.trained_forward("actor", tokens, prefetch)
        if models.reference is not None:
            peaks["ref_logprobs"] = self._frozen_forward(models.reference, tokens, self.length)
        if models.critic is not None:
            peaks["values"] = self.trained_forward("critic", tokens, prefetch)
            # the critic runs first; ZeRO-3 keeps its last layers gathered as if a backward followed
            peaks["old_logprobs"] += self.engines["critic"].gathered
        return peaks

    def _frozen_forward(self, model: FrozenModel, tokens: int, length: int) -> int:
        uploaded = model.resident(self.hardware.ranks) if model.offloaded and self.hardware.on_gpu else 0
        gathered = gathered_bytes(model.shape, model.each, prefetch=True) if model.sharded else 0
        return uploaded + gathered + self.forward(model.shape, tokens, length, model.each)

    def forward_tokens(self, budget: int, rows: int) -> int:
        """Counts the tokens of one rank in the largest forward, which the ranks of a sequence group share."""
        parts = self.config.memory.sequence_parallel
        return ceil(forward_tokens(parts * budget, parts * rows, self.length) / parts)

    def head_positions(self, tokens: int) -> int:
        """Returns an upper bound of the response tokens among ``tokens``; the head is applied only to these.

        A rank of a sequence group may have only response tokens, so the bound is the number of response
        tokens of the group, or ``tokens`` if that is smaller.
        """
        parts = self.config.memory.sequence_parallel
        return min(tokens, ceil(parts * tokens * self.config.sampling.max_new_tokens / self.length))

    # -- generation ----------------------------------------------------------------------------------------

    def _generation(self, rest: int, phases: dict[str, int]) -> tuple[str, bool, int]:
        """Adds the phases of generation to ``phases``; ``rest`` is the memory in use between phases.

        Returns a description of how the weights are held, whether each forward gathers them layer by layer,
        and the bytes of optimizer states that are offloaded to CPU memory during generation.
        """
        if self.vllm is not None:
            return self._engine_generation(self.vllm, rest, phases)
        _, shape, each = self._role("actor")
        zero = self.config.actor.zero
        memory, sharded, weights = self.config.memory, zero.stage == 3, each * shape.parameters
        budget = int(memory.rollout_tokens)
        slots = max(1, min(budget // self.length, fast_batch_size(self.decoded)))
        length = -(-self.length // COLUMNS) * COLUMNS
        prompts = min(slots, ceil(self.decoded / self.config.rollout.samples_per_prompt))
        sampling, on_gpu = self.config.sampling, self.hardware.on_gpu
        logit = logit_bytes(each, on_gpu, sampling.top_k, sampling.top_p)
        plan, moved = self._plan(
            rest,
            weights=weights if sharded else 0,
            layer=min(weights, each * REUSE) if sharded else 0,
            decoding=decoding_bytes(self.config, shape, each, self.decoded, self.length, on_gpu),
        )
        if not sharded:
            gathered, description = 0, "weights whole on each rank"
        elif plan.gather_once:
            gathered, description = weights, "weights gathered once"
            switch = each * min(shape.parameters, GATHER_ELEMENTS + shape.largest_tensor)
            phases["switch"] = rest - moved + weights + switch
        else:
            gathered = gathered_bytes(shape, each, prefetch=True)
            description = "weights gathered layer by layer"
        layerwise = sharded and not plan.gather_once
        recorded = not layerwise and records_steps(self.config, on_gpu)
        decode = static_decode_bytes(
            shape,
            tokens=slots * length,
            length=length,
            rows=slots,
            prefill=min(max(min(budget, PREFILL_TOKENS), self.prompt), prompts * self.prompt),
            waiting=self.decoded > slots,
            each=each,
            logit=logit,
            recorded=recorded,
        )
        graphs = KEPT_GRAPHS * GRAPH if recorded else 0
        packed = 0 if layerwise else packed_bytes(self.config, shape, on_gpu)
        phases["generate"] = rest - moved + gathered + decode + graphs + packed
        description += "; optimizer states offloaded" if plan.offload_states else ""
        return description, layerwise, moved

    def _engine_generation(
        self, engine: VllmMemory, rest: int, phases: dict[str, int]
    ) -> tuple[str, bool, int]:
        """Adds the phases of generation with vLLM to ``phases``; returns the same as ``_generation``.

        A vLLM engine that sleeps allocates its KV cache only after it has received the weights. ``rest``
        includes the bytes of the engine while it does not generate.
        """
        _, shape, each = self._role("actor")
        between = engine.between
        loaded = engine.loading(synced_bytes(shape, each, self.config.actor.zero.stage == 3))
        plan, moved = self._plan(rest, decoding=max(engine.awake, loaded) - between)
        phases["switch"] = rest - moved + loaded - between
        phases["generate"] = rest - moved + engine.awake - between
        divided = f"divided among {engine.group} ranks" if engine.group > 1 else "on each rank"
        held = f"vLLM's weights {divided}"
        asleep = f"; asleep in training, level {engine.sleep}" if engine.sleep else ""
        return f"{held}{asleep}{'; optimizer states offloaded' if plan.offload_states else ''}", False, moved

    def _plan(
        self, rest: int, *, decoding: int, weights: int = 0, layer: int = 0
    ) -> tuple[GenerationPlan, int]:
        """Plans generation as a run does; also returns the bytes of the optimizer states to offload."""
        idle = sum(
            engine.masters + engine.moments + (engine.buffers if self._role(role)[0].zero.stage == 3 else 0)
            for role, engine in self.engines.items()
        )
        usable, zero = self.hardware.usable, self.config.actor.zero
        plan = plan_generation(
            MemoryBudget(
                free=2**62 if usable is None else max(0, usable - rest),
                weights=weights,
                layer=layer,
                decoding=decoding,
                offloadable=idle,
            ),
            generation_gather=zero.generation_gather,
            offload_states=zero.offload_states,
            on_gpu=self.hardware.on_gpu,
        )
        return plan, idle if plan.offload_states and self.hardware.on_gpu else 0

    # -- updates -------------------------------------------------------------------------------------------

    def _updates(self) -> dict[str, int]:
        """Computes the peak of each model's update.

        The peak is at one of three moments: when the backward of the largest micro-batch begins, when the
        last backward ends, or during the optimizer step. Both models' backwards come before both steps
        (ppo/learner.py), so one model's gradients are in memory during the other model's backward.

        If the actor's graph is kept from before the update (memory.reuse_forwards), it adds nothing: it
        belongs to the only micro-batch, is made last before the update and is used first. If the critic's
        graph is kept too, it is in memory during the actor's backward. If only the critic's graph is kept,
        the critic's backward comes first, and its gradients are in memory during the actor's backward.
        """
        actor, critic = self.engines["actor"], self.engines.get("critic")
        if critic is None:
            return {"update_actor": max(self.backward("actor"), actor.gradients + actor.step)}
        others = 0
        for kept in map(kept_roles, with_sources(self.config)):
            if "critic" in kept:
                others = max(others, self.graph("critic") if "actor" in kept else critic.gradients)
        backward = self.backward("actor") + others
        return {
            "update_actor": max(backward, actor.gradients + actor.step + critic.gradients),
            "update_critic": max(actor.gradients + self.backward("critic"), critic.gradients + critic.step),
        }


def decoding_bytes(config: PPOConfig, shape: Shape, each: int, rows: int, length: int, on_gpu: bool) -> int:
    """Returns an upper bound of the bytes for decoding ``rows`` rows of at most ``length`` tokens on a rank.

    The plan of generation uses this bound for any backend that decodes with the actor's weights.
    """
    sampling, budget = config.sampling, int(config.memory.rollout_tokens)
    tokens = min(budget, rows * length)
    return decode_bytes_bound(
        shape,
        tokens,
        min(rows, max(1, tokens // sampling.max_new_tokens)),
        each,
        logit_bytes(each, on_gpu, sampling.top_k, sampling.top_p),
        prefill=None if config.rollout.backend == "hf" else min(budget, PREFILL_TOKENS),
        recorded=records_steps(config, on_gpu),
    )


def records_steps(config: PPOConfig, on_gpu: bool) -> bool:
    """Returns whether decode steps are CUDA graphs, provided that weights are not gathered by layers."""
    return on_gpu and config.rollout.backend != "hf"


def packed_bytes(config: PPOConfig, shape: Shape, on_gpu: bool) -> int:
    """Computes the bytes of packed weights (models/linear.py) in generation with whole weights, or 0."""
    dtype = torch_dtype(config.actor.model.dtype)
    packs = not on_gpu and config.rollout.backend != "hf" and matmul.packs(torch.empty(1, dtype=dtype))
    size = dtype.itemsize * shape.linear
    return size if packs and pays(size, config.sampling.max_new_tokens) else 0
