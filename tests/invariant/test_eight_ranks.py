"""Tests the whole PPO loop on eight ranks, with tensors that have fewer elements than there are ranks.

Each run samples its responses on eight ranks, evaluates and saves checkpoints. Its weights are compared
with those of one rank without ZeRO, and of fewer ranks that continue from one of its checkpoints; both train
on the same responses. All collectives of the eight ranks are recorded and compared.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from ppo_ds.models import tiny
from tests.invariant import invariant_assets
from tests.invariant.invariant_runs import ASSETS, Case, Launches, case, staged
from tests.invariant.test_training import gaps
from tests.support.collectives import differences, read_calls
from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow

RANKS, STEPS, SAVED = 8, 2, 1  # a step has two optimizer steps
ROWS = 24  # prompts per step, which 8 and 3 divide
EVAL_PROMPTS = 5  # some ranks have none
# Ranks 0 and 5 generate responses of one token, the others up to ten.
SHORT = [rank * ROWS // RANKS + i for rank in (0, 5) for i in range(ROWS // RANKS)]


@torch.no_grad()
def make(root: Path) -> None:
    """Writes models whose smallest tensors have two elements (the biases of keys and values), and prompts."""
    tokenizer = tiny.character_tokenizer(invariant_assets.CHARACTERS)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.stop_ids[0],
        pad_token_id=tokenizer.pad_id,
        num_labels=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for folder, kind in (("small", LlamaForCausalLM), ("small_scorer", LlamaForSequenceClassification)):
            model = kind(config)
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.5)
            tiny.save(model, tokenizer, root / folder)
    rows = [
        {"prompt": prompt, "max_new_tokens": 1 if i in SHORT else 10}
        for i, prompt in enumerate(2 * invariant_assets.PROMPTS)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:EVAL_PROMPTS]))


BASE: dict[str, Any] = {
    "run": {"steps": STEPS},
    "actor": {"model": {"path": f"{ASSETS}/small"}},
    "critic": {"model": {"path": f"{ASSETS}/small_scorer"}},
    "rollout": {"prompts_per_step": ROWS, "samples_per_prompt": 1},
    "data": {"path": f"{ASSETS}/rows.jsonl", "eval_path": f"{ASSETS}/heldout.jsonl", "shuffle": False},
    "algo": {"epochs": 2, "minibatch_size": ROWS},
    # several micro-batches per rank
    "memory": {"rollout_tokens": 200, "score_tokens": 60, "train_tokens": 60},
    "eval": {"every": 1},
    "checkpoint": {"every": SAVED, "keep_last": 9},
}
ADAPTED = {"lora": {"rank": 1, "targets": ["k_proj", "down_proj"]}}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2": (2, {"critic": ADAPTED}),
    "zero3": (3, {"actor": ADAPTED}),
}
RESUMED_ON = {"zero2": 2, "zero3": 3}


def cases(names: list[str], way: str) -> list[Case]:
    found = []
    for name in names:
        stage, models = KINDS[name]
        common, rollouts = [BASE, models], f"{name}.safetensors"
        resume = {"run": {"resume": f"{ASSETS}/eight/{name}/checkpoints/step_{SAVED:06d}"}}
        switches = {"rollouts": rollouts, "generate": "record" if way == "eight" else "replay"}
        overlays = [*common, staged(0 if way == "one" else stage), *([resume] if way == "fewer" else [])]
        found.append(case(name, *overlays, **switches))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Launches:
    root = tmp_path_factory.mktemp("eight")
    make(root)
    launches = Launches(root, rank_server)
    try:
        launches.launch(RANKS, cases(list(KINDS), "eight"), "eight", function="record_and_run")
    except AssertionError as error:  # ranks that call different collectives may hang
        raise AssertionError("\n".join([*recorded_differences(root), str(error)])) from None
    launches.launch(1, cases(list(KINDS), "one"), "one")
    for name, ranks in RESUMED_ON.items():
        launches.launch(ranks, cases([name], "fewer"), "fewer " + name)
    return launches


def recorded_differences(root: Path) -> list[str]:
    return differences([read_calls(root / "eight" / f"rank{rank}.jsonl") for rank in range(RANKS)])


def test_all_ranks_call_the_same_collectives(runs: Launches) -> None:
    assert recorded_differences(runs.root) == []
    calls = read_calls(runs.root / "eight" / "rank0.jsonl")
    names = Counter(call.name for call in calls)
    # gradients are summed by all_reduce with ZeRO-2, and by reduce_scatter with ZeRO-3
    assert names["reduce_scatter_tensor SUM"] and names["all_reduce SUM"] > 50, names
    assert names["all_gather_into_tensor"] > 500 and names["all_gather_object"] > 50, names


@pytest.mark.parametrize("name", KINDS)
def test_some_ranks_have_short_responses_and_some_nothing_to_evaluate(runs: Launches, name: str) -> None:
    eight = runs[f"eight/{name}"]
    lengths = [row["length"] for row in eight.samples(1)]
    assert len(lengths) == ROWS and max(lengths) == 10
    assert {lengths[i] for i in SHORT} == {1}
    evaluated = (eight.folder / f"samples/eval_step_{STEPS:06d}.jsonl").read_text().splitlines()
    assert len(evaluated) == EVAL_PROMPTS < RANKS


@pytest.mark.parametrize("name", KINDS)
def test_eight_ranks_train_like_one(runs: Launches, name: str) -> None:
    eight = runs[f"eight/{name}"]
    assert gaps(runs[f"one/{name}"], eight, weights_within=1e-6) == []
    assert len(eight.steps) == STEPS and all("eval/score_mean" in step for step in eight.steps)
    for role in ("actor", "critic"):
        assert len(eight.found["norms"][role]) == 2 * STEPS
        trained = [weight for key, weight in eight.weights(role).items() if ".base_layer." not in key]
        assert min(weight.numel() for weight in trained) == 2


@pytest.mark.parametrize("name", KINDS)
def test_fewer_ranks_continue_from_a_checkpoint_of_eight(runs: Launches, name: str) -> None:
    eight, fewer = runs[f"eight/{name}"], runs[f"fewer {name}/{name}"]
    assert [step["step"] for step in fewer.steps] == [2]
    found = {"norms": {role: norms[2 * SAVED :] for role, norms in eight.found["norms"].items()}}
    rest = SimpleNamespace(
        steps=eight.steps[SAVED:], found=found, weights=eight.weights, samples=eight.samples
    )
    assert gaps(rest, fewer, weights_within=1e-6) == []
