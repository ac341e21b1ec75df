"""Generates responses of several models to the same prompts, and computes their log-probs.

Each rank holds one whole policy at a time. The responses do not depend on the number of ranks, because they
are sampled in fixed groups of prompts, each with a separate seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ppo_ds.assemble.data import build_compared, stop_ids
from ppo_ds.assemble.multi_turn import with_environment
from ppo_ds.assemble.ppo import build_sampling
from ppo_ds.compute.batching import plan_forwards
from ppo_ds.config.registry import import_target
from ppo_ds.config.schema import Config, PPOConfig
from ppo_ds.data.prompts import PromptSource
from ppo_ds.distributed.world import World, seed_everything
from ppo_ds.engine.frozen import FrozenModel, freeze
from ppo_ds.engine.rng import fork_rng
from ppo_ds.errors import UserError
from ppo_ds.models.download import download_files, download_weights
from ppo_ds.models.policy import Policy
from ppo_ds.models.size import shape_of
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.planning.budgets import largest_decoding, largest_scoring
from ppo_ds.ppo.minibatches import scatter_tokens
from ppo_ds.rollout.base import Generator
from ppo_ds.rollout.keys import BACKENDS
from ppo_ds.run.microbatches import forward_rows
from ppo_ds.tools.loading import hub_models, load_decoder, tokenizer_of
from ppo_ds.tools.model_argument import NamedModel
from ppo_ds.types import Prompts, Rollout, Row

MAX_ROWS = 512  # responses of a batch; see planning/budgets.MAX_DECODED_ROWS
GROUPS = 16  # minimum number of groups of prompts; each group's responses are sampled with one seed


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together."""

    prompts: Prompts
    numbers: list[int]  # number of the prompt of each row
    samples: list[int]  # number of the response of each row among those to its prompt
    seed: int
    counted: bool  # False if the batch only fills up this rank's number of batches


@dataclass(frozen=True)
class Reader:
    """A tokenizer and the prompts that it has tokenized. Models with the same tokenizer share a Reader."""

    tokenizer: Tokenizer
    source: PromptSource
    batches: list[Batch]  # of this rank
    longest: int  # tokens of the longest prompt with its response

    def examples(self) -> list[tuple[str, Row]]:
        return self.source.examples()

    def check_rows(self, check: Callable[[Row], object]) -> None:
        self.source.check_rows(check)


@dataclass
class Responses:
    """This rank's responses of one model."""

    reader: Reader
    rollouts: list[Rollout]  # one per batch
    seconds: float  # time of the generation
    # of each batch, [B,R]: log-probs by the model itself; [] if not computed
    logprobs: list[Tensor] = field(default_factory=list)
    # of each batch, [B]: sum over the tokens of log p_model - log p_first; [] if not computed
    log_ratios: list[Tensor] = field(default_factory=list)

    def compare(self, first_logprobs: Sequence[Tensor]) -> None:
        """Sets ``log_ratios`` from the log-probs of the same tokens by the first model."""
        for rollout, own, first in zip(self.rollouts, self.logprobs, first_logprobs, strict=True):
            difference = (own.double() - first.double()).masked_fill(~rollout.response_mask, 0.0)
            self.log_ratios.append(difference.sum(1))

    def row(self, batch: int, i: int) -> dict[str, Any]:
        """Returns the text of one response, its number of tokens, whether it finished, and its log-ratio."""
        rollout = self.rollouts[batch]
        ids = rollout.response_ids[i][rollout.response_mask[i]].tolist()
        text = self.reader.tokenizer.decode(ids)
        row = {"response": text, "tokens": len(ids), "finished": bool(rollout.finished[i])}
        return row | ({"log_ratio": float(self.log_ratios[batch][i])} if self.log_ratios else {})


def respond(
    config: PPOConfig,
    world: World,
    models: Sequence[NamedModel],
    readers: Mapping[str, Reader],
    samples: int | None,
    note: Callable[[str], None],
) -> dict[str, Responses]:
    """Returns this rank's responses of each model, in the order of ``models``. All ranks must call this.

    Log-ratios are computed at the sampling temperature, for models with the vocabulary of the first model.
    The first model is loaded last, since it then also scores the responses of the others.
    """
    hub = hub_models(config, models)
    first, found = models[0], dict[str, Responses]()
    names, of_first = [model.name for model in models[1:]], readers[first.name]
    comparable = [name for name in names if same_vocabulary(readers[name], of_first)]
    for model in (*models[1:], first):
        note(f"evaluation  {model.name}: responses of {model.adapter or model.path}")
        download_weights([entry for entry in hub if entry.path == model.path], world)
        reader = readers[model.name]
        policy = load_decoder(config, model, reader.tokenizer, reader.longest)
        frozen = freeze(policy, world=world, offload=False, deepspeed_config=None)
        rollouts, seconds = generate(config, world, policy, reader, greedy=samples is None)
        found[model.name] = Responses(reader, rollouts, seconds)
        if comparable and (model is first or model.name in comparable):
            budget = config.memory.score_tokens
            if budget == "auto":
                longest = max(reader.longest for reader in readers.values())
                budget = largest_scoring(world, [(shape_of(policy.lm), config.actor.model.dtype)], longest)
            if model is not first:
                found[model.name].logprobs = logprobs_of(frozen, rollouts, budget)
            for name in comparable if model is first else ():
                found[name].compare(logprobs_of(frozen, found[name].rollouts, budget))
        del policy, frozen  # before the next model is loaded
    return {model.name: found[model.name] for model in models}


def read_prompts(
    config: PPOConfig, world: World, models: Sequence[NamedModel], samples: int | None
) -> dict[str, Reader]:
    """Downloads and reads the tokenizer and the prompts of each model. All ranks must call this.

    Raises UserError if data.long_prompts=drop may drop different prompts for different models.
    """
    download_files(hub_models(config, models), world)
    readers: dict[str, Reader] = {}
    for model in models:
        path = model.tokenizer_path
        if path in readers:
            continue
        tokenizer = tokenizer_of(config, model)
        try:
            source = build_compared(config, tokenizer, world)
        except UserError as error:
            own = f" (with the tokenizer of {model.name})" if len(models) > 1 else ""
            raise UserError(*(f"{problem}{own}" for problem in error.problems)) from None
        batches = make_batches(config, source, world, samples)
        own_prompt = config.data.max_prompt_tokens if config.rollout.environment.path else 0
        longest = max(source.longest, own_prompt) + config.sampling.max_new_tokens
        readers[path] = Reader(tokenizer, source, batches, longest)
    by_model = {model.name: readers[model.tokenizer_path] for model in models}
    first = by_model[models[0].name]
    for name, reader in by_model.items():
        dropped = reader.source.report.get("dropped", 0) or first.source.report.get("dropped", 0)
        if dropped and not same_vocabulary(reader, first):
            raise UserError(
                f"data.long_prompts=drop: the tokenizers of {models[0].name} and {name} would drop different "
                "prompts; set data.long_prompts=truncate_left, or raise data.max_prompt_tokens"
            )
    return by_model


def make_batches(config: Config, source: PromptSource, world: World, samples: int | None) -> list[Batch]:
    """Returns this rank's batches. All ranks get equally many, because scoring may be a collective."""
    count, each = min(config.eval.max_prompts or len(source), len(source)), samples or 1
    size = min(-(-count // (world.size if samples is None else GROUPS)), max(1, MAX_ROWS // each))
    starts = range(0, count, size)
    batches = []
    for round_start in range(0, len(starts), world.size):
        counted = round_start + world.rank < len(starts)
        start = starts[round_start + world.rank] if counted else starts[0]
        rows = [(i, j) for i in range(start, min(start + size, count)) for j in range(each)]
        numbers, of_prompt = [i for i, _ in rows], [j for _, j in rows]
        seed = 1_000_003 * config.run.seed + start
        batches.append(Batch(source.batch(numbers), numbers, of_prompt, seed, counted))
    return batches


def same_vocabulary(reader: Reader, other: Reader) -> bool:
    """Returns whether two tokenizers use the same ids for the same tokens."""
    return reader is other or reader.tokenizer.hf.get_vocab() == other.tokenizer.hf.get_vocab()


@torch.no_grad()
def generate(
    config: PPOConfig, world: World, policy: Policy, reader: Reader, greedy: bool
) -> tuple[list[Rollout], float]:
    """Returns a policy's responses to this rank's prompts, and the time in seconds."""
    name = choose_backend(config, policy, reader.longest)
    budget = config.memory.rollout_tokens
    if budget == "auto":
        rows = max(len(batch.prompts) for batch in reader.batches)
        budget = largest_decoding(config, world, shape_of(policy.lm), reader.longest, rows)
    backend: Generator = import_target(BACKENDS[name].generator)(
        lm=lambda: policy.lm,
        tokenizer=reader.tokenizer,
        token_budget=budget,
        lockstep_max=None,
        should_stop=lambda: False,
    )
    generator = with_environment(config, world, reader.tokenizer, backend, check=lambda: None)
    sampling = build_sampling(config, stop_ids(config, reader.tokenizer), config.sampling.temperature)
    if greedy:
        sampling = sampling.as_greedy()
    rollouts, seconds = [], 0.0
    with fork_rng(world):
        for batch in reader.batches:
            seed_everything(batch.seed)
            start = time.perf_counter()
            rollouts.append(generator(batch.prompts, sampling))
            seconds += (time.perf_counter() - start) * batch.counted
    return rollouts, seconds


def choose_backend(config: PPOConfig, policy: Policy, longest: int) -> str:
    """Returns the name of a decode backend; raises UserError if each possible backend rejects the model.

    Never returns a backend with its own weights (vLLM); rollout.backend=auto applies instead.
    """
    asked = config.rollout.backend
    names = [asked]
    if asked == "auto" or config.rollout.own_weights:  # such a backend needs the trained model's engine
        names = [name for name, backend in BACKENDS.items() if backend.in_auto]
    reasons = []
    for name in names:
        refusal = BACKENDS[name].refusal
        reason = import_target(refusal)(policy.lm, longest) if refusal else None
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    raise UserError(f"rollout.backend={asked}: {'; '.join(reasons)}; use rollout.backend=auto")


def logprobs_of(model: FrozenModel, rollouts: Sequence[Rollout], budget: int) -> list[Tensor]:
    """Computes the log-probs of the response tokens of each rollout, [B,R] fp32 on the CPU."""
    found = []
    for rollout in rollouts:
        plan = plan_forwards(rollout.attention_mask.sum(1), budget)
        outputs = forward_rows(model, rollout.to(model.device), plan)
        found.append(scatter_tokens([output.logprobs for output in outputs], rollout, plan))
    return found
