"""Compares models on held-out prompts: greedy responses of each model, scored by the same rewards.

Each rank holds one whole policy at a time, and all models of the rewards. No model is sharded, except by the
rewards' own ZeRO settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_ds.build.data import build_held_out, build_tokenizer, stop_ids
from ppo_ds.build.ppo import build_sampling
from ppo_ds.build.reward_models import RewardModels, build_reward
from ppo_ds.build.roles import ppo_needs
from ppo_ds.build.token_budgets import CPU_LIMITS, largest_decoding, largest_scoring
from ppo_ds.config.registry import DECODE_BACKENDS, import_target, resolve
from ppo_ds.config.schema import Config, rollout_size
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.data.prompts import eval_batches
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import freeze
from ppo_ds.errors import UserError
from ppo_ds.models.policy import Policy, load_policy
from ppo_ds.models.size import shape_of
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.weighted import WeightedReward
from ppo_ds.rollout.base import Generator
from ppo_ds.tools.comparison import compare
from ppo_ds.training.token_budgets import TokenBudget
from ppo_ds.types import Prompts, Reward, Rollout

Batches = list[tuple[Prompts, Tensor]]


@dataclass(frozen=True)
class Comparison:
    """The result of ``evaluate``, the same on every rank."""

    summary: dict[str, Any]  # the content of evaluation.json
    rows: list[dict[str, Any]]  # one per prompt: the prompt, and each model's response and scores


def evaluate(
    config: Config,
    world: World,
    models: Mapping[str, str],
    rewards: Mapping[str, dict[str, Any]],
    note: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Compares ``models`` on the held-out prompts of ``config``. A collective.

    Args:
        config: The config of a PPO run. Its tokenizer, data, memory settings and sampling settings are used,
            except that decoding is greedy. actor.model gives all settings of the models but their paths.
        models: Names and paths of the policies, which have the vocabulary of the config's actor.
        rewards: Names and sections of the rewards that score the responses.
        note: Receives lines about the progress.
    """
    tokenizer = build_tokenizer(config)
    held_out = build_held_out(config, tokenizer, world)
    if held_out is None:
        raise UserError("data.eval_path is missing: the evaluation needs held-out prompts")
    batches = eval_batches(
        held_out,
        rank=world.rank,
        world_size=world.size,
        rows_per_batch=max(1, rollout_size(config) // world.size),
        max_prompts=config.eval.max_prompts,
    )
    longest = held_out.longest + config.sampling.max_new_tokens
    rollouts = {}
    for name, path in models.items():
        note(f"evaluation  {name}: responses of {path}")
        policy = load_model(config, path, f"evaluation.models.{name}", tokenizer, longest)
        rollouts[name] = generate(config, world, policy, tokenizer, batches, longest)
        del policy  # before the next one is loaded

    load_frozen = RewardModels(world, note)
    score_tokens = config.memory.score_tokens
    score_budget = TokenBudget(
        "score_tokens", CPU_LIMITS["score_tokens"] if score_tokens == "auto" else score_tokens
    )
    scorers: dict[str, Reward] = {}
    for name, section in rewards.items():
        note(f"evaluation  score by {name}")
        reward = build_reward(
            section,
            tokenizer=tokenizer,
            load_frozen=load_frozen,
            score_tokens=score_budget,
            all_reduce_max=world.max_int,
            reduce=world.sum,
            should_stop=lambda: False,
            note=note,
        )
        scorers[name] = reward.evaluate if isinstance(reward, WeightedReward) else reward
    if score_tokens == "auto":
        shapes = [(model.shape, model.section.dtype) for model in load_frozen.loaded]
        score_budget.set(largest_scoring(world, shapes, longest))
    rows = score_rows(rollouts, scorers, batches, tokenizer)
    everything = [row for part in world.gather_objects(rows) for row in part]
    return Comparison(summarize(everything, held_out.path, list(models), list(rewards)), everything)


def load_model(config: Config, path: str, key: str, tokenizer: Tokenizer, longest: int) -> Policy:
    """Loads a policy. Raises UserError if it cannot read the tokenizer's ids, or ``longest`` tokens."""
    actor = config.actor.model
    own = {} if path == actor.path else {"revision": None}
    model = ModelConfig(**actor.model_dump() | {"path": path, "gradient_checkpointing": False} | own)
    policy = load_policy(model, temperature=config.sampling.temperature, key=key)
    ppo_needs(tokenizer.id_bound, longest).check(policy, path, key)
    return policy


@torch.no_grad()
def generate(
    config: Config, world: World, policy: Policy, tokenizer: Tokenizer, batches: Batches, longest: int
) -> list[Rollout]:
    """Returns the greedy responses of a policy to this rank's prompts.

    ``rollout.backend=auto`` takes the first backend that supports the model. Unlike in training, no parity
    check compares its log-probs with those of training.
    """
    freeze(policy, world=world, offload=False, deepspeed_config=None)
    asked = config.rollout.backend
    names = [asked] if asked != "auto" else [name for name, entry in DECODE_BACKENDS.items() if entry.in_auto]
    reasons = []
    for name in names:
        refusal = DECODE_BACKENDS[name].refusal
        reason = import_target(refusal)(policy.lm, longest) if refusal else None
        if reason is None:
            break
        reasons.append(f"{name}: {reason}")
    else:
        raise UserError(f"rollout.backend={asked}: {'; '.join(reasons)}; use rollout.backend=auto")
    budget = config.memory.rollout_tokens
    if budget == "auto":
        budget = largest_decoding(config, world, shape_of(policy.lm), longest)
    generator: Generator = resolve(DECODE_BACKENDS[name])(
        lm=lambda: policy.lm,
        tokenizer=tokenizer,
        token_budget=budget,
        lockstep_max=None,
        should_stop=lambda: False,
    )
    stops = stop_ids(config, tokenizer)
    sampling = build_sampling(config, stops, config.sampling.temperature).as_greedy()
    return [generator(prompts, sampling) for prompts, _ in batches]


def score_rows(
    rollouts: Mapping[str, list[Rollout]],
    scorers: Mapping[str, Reward],
    batches: Batches,
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """Returns one row for each of this rank's prompts, without the rows that only fill up a batch."""
    rows: list[dict[str, Any]] = []
    for index, (prompts, weights) in enumerate(batches):
        scores = {
            name: {reward: scorer(made[index]).sums.tolist() for reward, scorer in scorers.items()}
            for name, made in rollouts.items()
        }
        for i in weights.nonzero().flatten().tolist():
            responses = {}
            for name, made in rollouts.items():
                rollout = made[index]
                ids = rollout.response_ids[i][rollout.response_mask[i]].tolist()
                responses[name] = {
                    "response": tokenizer.decode(ids),
                    "tokens": len(ids),
                    "finished": bool(rollout.finished[i]),
                    "scores": {reward: values[i] for reward, values in scores[name].items()},
                }
            rows.append({"prompt": prompts.metadata[i]["prompt_text"], "responses": responses})
    return rows


def summarize(rows: list[dict[str, Any]], data: str, models: list[str], rewards: list[str]) -> dict[str, Any]:
    """Returns the content of evaluation.json."""
    responses = {name: [row["responses"][name] for row in rows] for name in models}
    return {
        "data": data,
        "prompts": len(rows),
        "rewards": {
            reward: compare({name: [one["scores"][reward] for one in responses[name]] for name in models})
            for reward in rewards
        },
        "responses": {
            name: {
                "tokens_mean": sum(one["tokens"] for one in responses[name]) / len(rows),
                "finished_frac": sum(one["finished"] for one in responses[name]) / len(rows),
            }
            for name in models
        },
    }
