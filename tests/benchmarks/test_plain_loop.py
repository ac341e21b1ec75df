"""Tests the plain PyTorch loop: its estimates by hand, its log-probs, and a run on a prepared folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import against, plain_loop
from benchmarks.options import parsed
from benchmarks.workloads import WORKLOADS, Shape, dry, prepare

WORK = replace(dry(WORKLOADS["W6"]), prompt_tokens=(2, 5), new_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare(WORK, folder)
    return folder


def arguments(folder: Path, *more: str) -> list[str]:
    words = f"--folder {folder} --steps 1 --prompts 8 --new-tokens 4 --max-prompt-tokens 5 --epochs 2"
    words += " --minibatches 2 --micro-rows 4 --rollout-rows 8 --threads 1 --dtype bf16 --lr 1e-3"
    return [*words.split(), "--json", str(folder / "out.json"), *more]


def test_the_loop_takes_its_optimizer_steps(folder):
    plain_loop.main(arguments(folder))
    found = json.loads((folder / "out.json").read_text())
    assert len(found["step_seconds"]) == len(found["cpu_seconds"]) == 1
    assert (found["samples_per_step"], found["response_tokens_mean"]) == (8, [4.0])


def test_the_loop_trains_both_models_and_no_other(folder):
    loop = plain_loop.Loop(plain_loop.parsed(arguments(folder)))
    models = (loop.policy, loop.values, loop.reference, loop.reward)
    before = [model.model.layers[0].mlp.up_proj.weight.clone() for model in models]
    loop.step()
    changed = [
        not torch.equal(was, model.model.layers[0].mlp.up_proj.weight)
        for was, model in zip(before, models, strict=True)
    ]
    assert changed == [True, True, False, False] and loop.optimizer_steps == 4


def test_padding_does_not_change_log_probs(folder):
    """A row of two prompt tokens has the same log-probs alone and beside rows of five tokens."""
    loop = plain_loop.Loop(plain_loop.parsed([*arguments(folder), "--dtype", "fp32"]))
    row = int(loop.prompt_mask.sum(1).argmin())
    mask = torch.cat([loop.prompt_mask, torch.ones(8, 4, dtype=torch.long)], dim=1)
    ids = torch.cat([loop.prompts, torch.randint(3, 256, (8, 4))], dim=1)
    together = loop.logprobs(loop.policy, ids, mask)[row]
    alone = ids[row][mask[row].bool()][None]
    logits = loop.policy(input_ids=alone).logits.log_softmax(-1)[0, -5:-1]
    torch.testing.assert_close(together, logits.gather(-1, alone[0, -4:, None])[:, 0])


def test_advantages_by_hand():
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 1.0]])
    last = 2.0 - 1.0
    first = 1.0 + 1.0 - 0.5 + 0.95 * last
    torch.testing.assert_close(plain_loop.estimate_advantages(rewards, values), torch.tensor([[first, last]]))


def test_the_loop_gets_the_threads_of_all_ranks_and_the_same_work():
    args = parsed(["W6", "--against", "plain", "--ranks", "2", "--threads", "1", "--minibatches", "1"])
    asked = plain_loop.parsed(against.their_arguments(args, Path("out.json")))
    assert (asked.threads, asked.minibatches, asked.micro_rows, asked.stop) == (2, 1, 16, False)
    ours = parsed(against.own_arguments(args, ["W6", "--against=plain", "--ranks", "2"], Path("a")))
    assert (ours.threads, ours.ranks, ours.against) == (1, None, None)


def test_w6_has_the_published_sizes():
    """The config of SmolLM2-135M; 30 layers of 3.54 M parameters, and the tied embedding."""
    shape = WORKLOADS["W6"].shape
    assert shape == Shape(576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True, rope_theta=100_000.0)
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert 30 * layer + 576 * 49152 + 576 == 134_515_008
