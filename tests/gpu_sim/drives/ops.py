"""Runs the functions of ppo_ds/ops on tensors of the device, with gradients, in each dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ppo_ds.algorithm.credit.gae import compute_gae
from ppo_ds.algorithm.loss.aggregation import BatchTotals
from ppo_ds.algorithm.loss.keys import LOSS_AGGREGATIONS
from ppo_ds.compute.linear_logprobs import KEPT, linear_statistics
from ppo_ds.finetune.pairwise import pairwise_loss
from ppo_ds.ops.logprobs import logprobs_and_entropy_from_logits, mean_logprobs_from_logits
from ppo_ds.ops.masked import masked_mean, masked_whiten, sum_and_count
from ppo_ds.ops.moments import RunningMoments
from ppo_ds.ops.sequences import (
    broadcast_sequence,
    last_token_index,
    next_token_mask,
    position_ids_from_mask,
    response_mask,
)
from ppo_ds.ops.token_sampling import draw
from tests.gpu_sim.cases import CASES as NAMES
from tests.gpu_sim.drives.parts import DTYPES
from tests.gpu_sim.fake_cuda import CUDA, FakeCuda
from tests.ops.by_name import (
    approx_kl,
    entropy_loss,
    kl_loss,
    normalize_advantages,
    policy_loss,
    rollout_is_weights,
    shape_scores,
    token_rewards,
    value_loss,
)

ROWS, WIDTH, VOCABULARY = 4, 6, 1000
TOTALS = BatchTotals(tokens=40.0, sequences=8.0, dp_size=2, norm=7.0)

Make = Callable[..., Tensor]  # makes a tensor of the given sizes that requires a gradient


def flags(*sizes: int) -> Tensor:
    return torch.ones(sizes, dtype=torch.bool, device=CUDA)


def numbers(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.long, device=CUDA)


def linear_logprobs(make: Make) -> None:
    hidden, weight, bias = make(30, 64), make(VOCABULARY, 64), make(VOCABULARY)
    for with_entropy in (True, False):
        for kept in (0, KEPT):
            found = linear_statistics(
                hidden,
                weight,
                bias,
                numbers(30),
                0.7,
                with_entropy=with_entropy,
                with_mean=True,
                kept_elements=kept,
                block_elements=10_000,
            )
            total = found.logprobs.sum() + found.mean_logprobs.sum()
            (total + found.entropy.sum() if with_entropy else total).backward()
    assert weight.grad.is_cuda and weight.grad.dtype == weight.dtype


def logprobs(make: Make) -> None:
    logits, labels = make(ROWS, WIDTH, VOCABULARY), numbers(ROWS, WIDTH)
    found, entropy = logprobs_and_entropy_from_logits(logits, labels, 0.7, chunk_size=8)
    mean = mean_logprobs_from_logits(logits, labels, found, 0.7)
    (found.sum() + entropy.sum() + mean.sum()).backward()


def masked(make: Make) -> None:
    x, mask = make(ROWS, WIDTH), flags(ROWS, WIDTH)
    masked_mean(x, mask, dim=1).sum().backward()
    masked_whiten(x, mask)
    sum_and_count(x, mask)


def kl(make: Make) -> None:
    x, reference = make(ROWS, WIDTH), make(ROWS, WIDTH)
    for estimator in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        approx_kl(x, reference, estimator, clamp=5.0).sum().backward()


def advantages(make: Make) -> None:
    rewards, values, mask = make(ROWS, WIDTH), make(ROWS, WIDTH), flags(ROWS, WIDTH)
    compute_gae(rewards, values, mask, bootstrap_value=make(ROWS), lam_critic=1.0)
    normalize_advantages(rewards, mask)


def rewards(make: Make) -> None:
    mask, kl_penalty = flags(ROWS, WIDTH), make(ROWS, WIDTH)
    for missing_eos in ("subtract", "set", "scale"):
        shape_scores(
            make(ROWS),
            finished=flags(ROWS),
            lengths=numbers(ROWS),
            max_new_tokens=numbers(ROWS),
            clip=5.0,
            missing_eos=missing_eos,
            overlong_buffer=4,
        )
    for position in ("last_token", "next_token"):
        token_rewards(make(ROWS), mask, kl_penalty, 0.1, position, token_scores=make(ROWS, WIDTH))


def sequences(make: Make) -> None:
    mask = flags(ROWS, WIDTH)
    response_mask(numbers(ROWS, WIDTH), (2, 5), lengths=numbers(ROWS), include_eos=False)
    last_token_index(mask), next_token_mask(mask), position_ids_from_mask(mask)
    broadcast_sequence(make(ROWS), mask).sum().backward()


def token_sampling(make: Make) -> None:
    uniforms = torch.rand(ROWS, dtype=torch.float64, device=CUDA)
    for top_k, top_p in ((0, 1.0), (50, 0.9), (1, 1.0)):
        for barred in (None, (numbers(2), flags(ROWS))):
            with torch.no_grad():
                logits = make(ROWS, VOCABULARY)
                draw(logits, uniforms, temperature=0.7, top_k=top_k, top_p=top_p, barred=barred)


def running(make: Make) -> None:
    moments = RunningMoments()
    moments.update(make(ROWS))
    moments.normalize(make(ROWS))


def losses(make: Make) -> None:
    mask, old, given = flags(ROWS, WIDTH), make(ROWS, WIDTH), make(ROWS, WIDTH)
    for aggregation in LOSS_AGGREGATIONS:
        for kind in ("ppo", "gspo", "cispo", "reinforce"):
            policy_loss(
                make(ROWS, WIDTH),
                old,
                given,
                mask,
                dual_clip=3.0,
                kind=kind,
                is_weights=given,
                agg=aggregation,
                totals=TOTALS,
            )[0].backward()
        value_loss(make(ROWS, WIDTH), old, given, mask, clip=0.2, agg=aggregation, totals=TOTALS)[
            0
        ].backward()
        entropy_loss(make(ROWS, WIDTH), mask, aggregation, TOTALS).backward()
        kl_loss(make(ROWS, WIDTH), old, mask, "k2", aggregation, TOTALS).backward()
    for kind in ("tis", "icepop", "seq_mask_tis"):
        rollout_is_weights(old, given, mask, kind, 0.5, 2.0)
    for kind in ("truncate", "mask"):
        for level in ("token", "sequence", "sequence_mean"):
            rollout_is_weights(old, given, mask, kind, 0.5, 2.0, level)


def pairs(make: Make) -> None:
    chosen, rejected = make(ROWS), make(ROWS)
    pairwise_loss(
        chosen, rejected, margins=make(ROWS), centering=0.01, label_smoothing=0.1, pairs=8, dp_size=2
    )[0].backward()


FUNCTIONS = {
    "linear_logprobs": linear_logprobs,
    "logprobs": logprobs,
    "masked": masked,
    "kl": kl,
    "advantages": advantages,
    "rewards": rewards,
    "sequences": sequences,
    "token_sampling": token_sampling,
    "running": running,
    "losses": losses,
    "pairwise_loss": pairs,
}


def run(device: FakeCuda, name: str) -> None:
    function, _, dtype = name.partition(" ")

    def make(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=DTYPES[dtype], device=CUDA, requires_grad=True)

    FUNCTIONS[function](make)


CASES = {name: partial(run, name=name) for name in NAMES["ops"]}
