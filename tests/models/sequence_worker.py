"""Runs models of several families on whole rows, and on rows whose tokens the ranks divide.

Rank 0 writes the differences and the bytes that each rank keeps for the backward to ``FOLDER/found.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_ds.distributed.world import World, connect
from ppo_ds.models.policy import Policy
from ppo_ds.models.value import ScoreModel
from tests.models.test_sequence_parallel import FAMILIES, WIDTH

LENGTHS = ((5, 40), (3, 1), (9, 17))  # tokens of prompts and responses; 75 tokens need filling


def rows() -> tuple[Tensor, Tensor]:
    """Returns ids and attention mask [3,T] of rows with padding on both sides."""
    longest = max(prompt for prompt, _ in LENGTHS)
    mask = torch.zeros(len(LENGTHS), longest + WIDTH, dtype=torch.bool)
    for row, (prompt, response) in zip(mask, LENGTHS, strict=True):
        row[longest - prompt : longest + response] = True
    return torch.randint(3, 50, mask.shape, generator=torch.Generator().manual_seed(0)), mask


def outputs(model: nn.Module, **options: Any) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Returns the outputs of ``model``, the gradients of a loss, and the bytes of activations for them."""
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    model.zero_grad()
    ids, mask = rows()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = model(ids, mask, WIDTH, **options)
    found = [out] if torch.is_tensor(out) else [x for x in out if x is not None]
    sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in found).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [x.detach() for x in found], gradients, sum(kept.values())


def compared(model: nn.Module, world: World, **options: Any) -> dict[str, float]:
    """Returns the largest relative differences of outputs and gradients, and the ratio of kept bytes."""
    whole, gradients, bytes_whole = outputs(model, **options)
    parts, part_gradients, bytes_part = outputs(model, sequence=world.sequence, **options)
    # each rank has the loss of all tokens: the mean over ranks is the gradient of one of them
    means = {name: world.sum(gradient) / world.size for name, gradient in part_gradients.items()}
    assert means.keys() == gradients.keys()

    def gap(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max() / b.abs().max())

    return {
        "outputs": max(gap(a, b) for a, b in zip(parts, whole, strict=True)),
        "gradients": max(gap(means[name], gradient) for name, gradient in gradients.items()),
        "kept": bytes_part / bytes_whole,
    }


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    world = connect(5, sequence_ranks=ranks, threads=1)
    assert world.sum_of_shares(torch.ones(1)).item() == world.data_size == world.size // ranks
    found = {}
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        policy = Policy(AutoModelForCausalLM.from_config(config), 0.7, value_head=True)
        nn.init.normal_(policy.value_head.weight)
        config.num_labels = 1
        critic = ScoreModel(AutoModelForSequenceClassification.from_config(config))
        for model in (policy, critic):
            model.packed = True
            assert model.why_not_divided(ranks) is None
        found[name] = compared(policy, world, with_entropy=True, with_mean=True)
        found[f"{name} critic"] = compared(critic, world)
    if world.is_main:
        (folder / "found.json").write_text(json.dumps(found))
    world.close()
