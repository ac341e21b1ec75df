"""Lists the runs that are compared. A label is a ZeRO stage and the difference from its plain run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.invariant.invariant_runs import ASSETS, Case, case, merged, staged
from tests.invariant.mistakes import MISTAKES

ROW_BY_ROW = {"memory": {"score_tokens": 1, "train_tokens": 1}}  # each row is a separate forward
AT_ONCE = {"memory": {"score_tokens": 10**6, "train_tokens": 10**6}}
PACKED = {"memory": {"layout": "packed"}}
CHECKPOINTED = {"actor": {"model": {"gradient_checkpointing": True}}}  # the critic inherits the setting
OTHER_AGGREGATION = {
    "algo": {
        "loss": {"agg": "seq_mean_token_mean"},
        "kl": {"place": "loss", "estimator": "k3"},
        "advantage": {"whiten": "none"},
    }
}
GREEDY = {"sampling": {"top_k": 1}}
HF = {"rollout": {"backend": "hf"}}  # the default, auto, selects static
LAYERS = {"actor": {"zero": {"generation_gather": "layers", "offload_states": "always"}}}
SAME_PROMPT = {
    "data": {"path": f"{ASSETS}/same.jsonl"},
    "rollout": {"samples_per_prompt": 1},
    "sampling": {"stop_token_ids": []},
}
TIED = {"actor": {"model": {"path": f"{ASSETS}/tied"}}}
OTHER_REFERENCE = {"reference": {"model": {"path": f"{ASSETS}/other"}}}
MODEL_REWARD = {
    "reward": {
        "_target_": "ppo_ds.rewards.model.model_reward",
        "model": {"path": f"{ASSETS}/scorer", "dtype": "fp32"},
    },
    "critic": {"init": "auto", "model": {"path": None}},
}
SHARDED_REWARD = {"reward": {**MODEL_REWARD["reward"], "zero": {"stage": 3}}}
FROM_ACTOR = {"critic": {"init": "actor", "model": {"path": None}}}
ONE_STEP = {"run": {"steps": 1}}
# Adam normalises each gradient by its magnitude plus eps. With eps 1e-8, gradients near 0 that consist only
# of rounding errors change the weights noticeably.
# A critic with one value for each answer passes its optimum in two steps of 1e-3; its gradient there is a
# small remainder of large terms that cancel.
CALM = {"actor": {"optim": {"eps": 1e-5}}, "critic": {"optim": {"eps": 1e-5, "lr": 2e-4}}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    # two answers to each prompt, no critic
    "grpo": {
        "algo": {"advantage": {"estimator": "grpo", "whiten": "none"}},
        "critic": {"init": "auto", "model": {"path": None}},
    },
    "whole answers": {"algo": {"action_level": "sequence", "value": {"position": "prompt_last"}}},
    "one trunk": {"critic": {"share_trunk": True}},
    "kl in the loss": {"algo": {"kl": {"place": "loss", "estimator": "k2"}}},
    # the actor runs no forward before the update
    "decoded log-probs": {"algo": {"old_logprobs": "rollout"}, "health": {"max_parity": "auto"}},
}


def algorithms(stage: int) -> list[Case]:
    """Returns runs of four optimizer steps; the reference is another model, so the KL starts above 0."""
    common = merged(merged(CALM, OTHER_REFERENCE), ONE_STEP)
    return [case(f"zero{stage} {name}", staged(stage), common, how) for name, how in ALGORITHMS.items()]


def frozen(stage: int, **zero: Any) -> dict[str, Any]:
    return {"reference": {"zero": {"stage": stage, **zero}}}


ON_ONE_RANK: list[Case] = [
    case("zero0", staged(0), generate="record"),
    case("zero3", staged(3)),
    case("zero0 row by row", staged(0), ROW_BY_ROW),
    case("zero0 packed", staged(0), PACKED),
    case("zero0 checkpointed", staged(0), CHECKPOINTED),
    case("zero0 other aggregation", staged(0), OTHER_AGGREGATION),
    case("zero0 tied", staged(0), TIED),
    case("zero0 greedy", staged(0), GREEDY, generate="sample"),
    case("zero0 greedy hf", staged(0), GREEDY, HF, generate="sample"),
    case("zero0 critic from reward", staged(0), MODEL_REWARD, ONE_STEP),
    *algorithms(0),
]

ON_TWO_RANKS: list[Case] = [
    *[case(f"zero{stage}", staged(stage)) for stage in (0, 1, 2, 3)],
    case("zero3 row by row", staged(3), ROW_BY_ROW),
    case("zero3 packed", staged(3), PACKED, CHECKPOINTED),
    case("zero3 checkpointed", staged(3), CHECKPOINTED),
    case("zero2 offloaded", staged(2, offload_optimizer=True)),
    case("zero3 all offloaded", staged(3, offload_optimizer=True, offload_params=True)),
    case("zero2 other aggregation", staged(2), OTHER_AGGREGATION),
    *[case(f"zero{stage} bf16", staged(stage, "bf16")) for stage in (2, 3)],
    case("zero3 tied", staged(3), TIED),
    case("zero3 tied bf16", staged(3, "bf16"), TIED, ONE_STEP),
    case("zero3 greedy", staged(3), GREEDY, generate="sample"),
    case("zero3 greedy row by row", staged(3), GREEDY, {"memory": {"rollout_tokens": 1}}, generate="sample"),
    case("zero3 greedy layers", staged(3), GREEDY, LAYERS, generate="sample"),
    case("zero3 same prompt", staged(3), SAME_PROMPT, ONE_STEP, generate="sample"),
    case("replicated reference", staged(3), OTHER_REFERENCE, frozen(0), ONE_STEP),
    case("offloaded reference", staged(0), OTHER_REFERENCE, frozen(3, offload_params=True), ONE_STEP),
    case("zero3 critic from reward", staged(3), MODEL_REWARD, SHARDED_REWARD, ONE_STEP),
    case("zero3 critic from actor", staged(3), FROM_ACTOR, ONE_STEP),
    *algorithms(3),
    *[case(name, staged(2), AT_ONCE if name == "no exchange" else {}, mistake=name) for name in MISTAKES],
]

# The runs that the fast tests compare; a test that needs another is marked slow.
CORE = {
    *(f"1/{label}" for label in ("zero0", "zero3", "zero0 row by row", "zero0 packed")),
    *(f"2/{label}" for label in ("zero0", "zero2", "zero3", *MISTAKES)),
}


def tiered(names: Iterable[str]) -> list[Any]:
    """Returns the parameters of a test; those whose run is not in CORE are marked slow."""
    return [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in names]
