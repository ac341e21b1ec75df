"""Implements PPO so that reading suffices to check it: one process, one row at a time, no padding, no masks.

It uses no code of ppo_ds and follows the papers: Schulman et al. 2017 (clipped surrogate), Schulman et al.
2016 (GAE), Ziegler et al. 2019 (KL in the reward, value head).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

GAMMA, LAM, KL_COEF, ENTROPY_COEF, CLIP, GRAD_CLIP = 1.0, 0.95, 0.1, 0.01, 0.2, 1.0
LR, MIN_LR, WARMUP, WEIGHT_DECAY, BETAS, EPS = 1e-3, 1e-4, 1, 0.1, (0.9, 0.95), 1e-6
EPOCHS, MINIBATCH, SEED, STEPS = 2, 8, 1, 12

Row = tuple[Tensor, int]  # ids of prompt and answer, length of the answer


def recorded(file: Path) -> list[list[Row]]:
    """Returns the rows of each PPO step."""
    tensors = load_file(file)
    steps = sorted({int(name.partition("/")[0]) for name in tensors})
    columns = [
        {name.partition("/")[2]: x for name, x in tensors.items() if name.startswith(f"{step}/")}
        for step in steps
    ]
    return [
        [
            (ids[kept], int(n))
            for ids, kept, n in zip(c["ids"], c["attention_mask"], c["response_mask"].sum(1), strict=True)
        ]
        for c in columns
    ]


def language_model(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def score_model(folder: Path) -> nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def logprobs(model: nn.Module, row: Row) -> tuple[Tensor, Tensor]:
    """Computes log pi(a|s) and the entropy [n] at each token of the answer."""
    ids, n = row
    logp = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, ids[1:, None])[-n:, 0], -(logp.exp() * logp).sum(-1)[-n:]


def states(model: nn.Module, row: Row) -> Tensor:
    """Computes V(s) [n+1] before each token of the answer and after the last token."""
    ids, n = row
    return model.score(model.model(ids[None]).last_hidden_state)[0, -n - 1 :, 0]


def values(model: nn.Module, row: Row) -> Tensor:
    """Computes V(s) [n] before each token of the answer."""
    return states(model, row)[:-1]


def gae(rewards: Tensor, v: Tensor) -> Tensor:
    advantages, following = torch.zeros_like(v), 0.0
    for t in reversed(range(len(v))):
        next_value = v[t + 1] if t + 1 < len(v) else 0.0
        following = rewards[t] + GAMMA * next_value - v[t] + GAMMA * LAM * following
        advantages[t] = following
    return advantages


def learning_rate(step: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    return MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - 1 - WARMUP)))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices, vectors = (
        [p for p in model.parameters() if p.dim() > 1],
        [p for p in model.parameters() if p.dim() <= 1],
    )
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)


def apply(model: nn.Module, adamw: torch.optim.Optimizer, loss: Tensor, step: int) -> float:
    for group in adamw.param_groups:
        group["lr"] = learning_rate(step)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    adamw.step()
    adamw.zero_grad()
    return float(norm)


def minibatches(rows: int, step: int) -> Iterator[list[int]]:
    order = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    for _ in range(EPOCHS):
        for part in torch.randperm(rows, generator=order).split(MINIBATCH):
            yield part.tolist()


def train(root: Path, score: Callable[[list[int], list[int]], float]) -> dict[str, list[float] | nn.Module]:
    """Trains on the recorded rollouts; returns all gradient norms and the trained models.

    The reward is ``score(prompt ids, answer ids)``.
    """
    actor, reference, critic = (
        language_model(root / "actor"),
        language_model(root / "actor"),
        score_model(root / "scorer"),
    )
    actor_adamw, critic_adamw = optimizer(actor), optimizer(critic)
    norms: dict[str, list[float]] = {"actor": [], "critic": []}
    for ppo_step, rows in enumerate(recorded(root / "rollouts.safetensors")):
        with torch.no_grad():
            old = [logprobs(actor, row)[0] for row in rows]
            old_values = [values(critic, row) for row in rows]
            raw = []
            for row, lp, v in zip(rows, old, old_values, strict=True):
                rewards = -KL_COEF * (lp - logprobs(reference, row)[0])
                rewards[-1] += max(
                    -5.0, min(5.0, score(row[0][: -row[1]].tolist(), row[0][-row[1] :].tolist()))
                )
                raw.append(gae(rewards, v))
            returns = [a + v for a, v in zip(raw, old_values, strict=True)]
            every = torch.cat(raw)
            advantages = [(a - every.mean()) / every.std(correction=0) for a in raw]
        for minibatch in minibatches(len(rows), ppo_step):
            tokens = sum(rows[i][1] for i in minibatch)
            policy_loss = value_loss = torch.zeros(())
            for i in minibatch:
                lp, entropy = logprobs(actor, rows[i])
                ratio = (lp - old[i]).exp()
                surrogate = torch.minimum(
                    ratio * advantages[i], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[i]
                )
                policy_loss = policy_loss - (surrogate + ENTROPY_COEF * entropy).sum() / tokens
                v = values(critic, rows[i])
                near = old_values[i] + (v - old_values[i]).clamp(-CLIP, CLIP)
                value_loss = (
                    value_loss
                    + 0.5 * torch.maximum((v - returns[i]) ** 2, (near - returns[i]) ** 2).sum() / tokens
                )
            step = len(norms["actor"])
            norms["actor"].append(apply(actor, actor_adamw, policy_loss, step))
            norms["critic"].append(apply(critic, critic_adamw, value_loss, step))
    return {"norms": norms, "actor": actor, "critic": critic}
