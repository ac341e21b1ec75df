"""Metrics computed from an Experience. Every rank holds all rows, so no function communicates."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_ds.algorithm.kl.estimators import k1, k3
from ppo_ds.ops.histograms import count_equal_bins
from ppo_ds.ops.masked import masked_mean
from ppo_ds.types import ENDS, Experience, Histogram, Metrics


def describe(
    experience: Experience, *, kl_coef: float, samples_per_prompt: int, decoded_logprobs: bool = False
) -> Metrics:
    """Computes the metrics reward/*, kl/*, parity/*, value/* and rollout/* from the data before the update.

    With ``decoded_logprobs``, ``experience.logprobs`` come from the decode backend. Then the update measures
    parity/*, not this function.
    """
    mask = experience.response_mask
    scores, lengths = experience.scores.double(), experience.response_lengths
    # compared as bytes, since lists of Python numbers are much slower to build and hash
    responses = zip(experience.response_ids.cpu().numpy(), lengths.tolist(), strict=True)
    unique = {ids[:length].tobytes() for ids, length in responses}
    metrics = {
        "reward/score_mean": scores.mean(),
        "reward/score_std": scores.std(unbiased=False),
        "reward/score_min": scores.min(),
        "reward/score_max": scores.max(),
        "reward/missing_eos_frac": (~experience.finished).double().mean(),
        "rollout/prompt_len_mean": experience.prompt_lengths.double().mean(),
        "rollout/resp_len_mean": lengths.double().mean(),
        "rollout/resp_len_max": lengths.max(),
        "rollout/stop_frac": experience.finished.double().mean(),
        "rollout/truncated_frac": (~experience.finished).double().mean(),
        # responses without tokens, or with only an end token
        "rollout/empty_frac": (lengths <= experience.finished).double().mean(),
        "rollout/pad_frac": 1 - experience.attention_mask.sum() / experience.attention_mask.numel(),
        "rollout/unique_frac": len(unique) / len(experience),
    }
    if samples_per_prompt > 1:  # a single response has no standard deviation
        stds = scores.view(-1, samples_per_prompt).std(1, unbiased=False)
        metrics["rollout/zero_std_group_frac"] = (stds == 0).double().mean()
    if experience.logprobs is not None and not decoded_logprobs:
        metrics |= decode_gap(experience)
    if experience.values is not None and experience.returns is not None:
        returns, states = experience.returns.double(), experience.value_mask
        mean = masked_mean(returns, states)
        metrics["value/pred_mean"] = masked_mean(experience.values.double(), states)
        metrics["value/return_mean"] = mean
        metrics["value/return_std"] = masked_mean((returns - mean) ** 2, states).sqrt()
    if (log_ratio := reference_log_ratio(experience)) is not None:
        signed = log_ratio.double()
        positive = k3(log_ratio, torch.zeros_like(log_ratio))
        metrics["kl/ref_seq_mean"] = signed.sum(1).mean()
        metrics["kl/ref_token_mean"] = masked_mean(signed, mask)
        metrics["kl/ref_token_max"] = signed.max()
        metrics["kl/k3_token_mean"] = masked_mean(positive, mask)
    metrics |= episode_metrics(experience) | version_metrics(experience)
    return {name: float(value) for name, value in metrics.items()} | {"kl/coef": kl_coef}


def decode_gap(experience: Experience) -> dict[str, Tensor]:
    """Computes the mean and maximum |difference| between the log-probs of generation and of training.

    Tokens that earlier versions of the policy sampled do not count.
    """
    mask = experience.response_mask
    if experience.staleness is not None:
        mask = mask & (experience.staleness == 0)
    gap = (experience.decode_logprobs - experience.logprobs).abs().masked_fill(~mask, 0.0)
    return {
        "parity/logp_abs_diff_mean": masked_mean(gap.double(), mask),
        "parity/logp_abs_diff_max": gap.max(),
    }


def episode_metrics(experience: Experience) -> dict[str, Tensor]:
    """Computes the metrics of an environment; {} without an environment."""
    feedback, notes = experience.feedback_mask, experience.notes
    if feedback is None or notes is None:
        return {}
    ends = [note["episode_end"] for note in notes]
    return {
        "rollout/turns_mean": count_turns(feedback, experience.response_lengths).double().mean(),
        "rollout/feedback_len_mean": feedback.sum(1).double().mean(),
    } | {
        f"rollout/ended_{end}_frac": torch.tensor([float(reason == end) for reason in ends]).mean()
        for end in ENDS
    }


def version_metrics(experience: Experience) -> dict[str, Tensor]:
    """Computes the share of stale tokens and the policy versions per response; {} without rollout.partial."""
    staleness, attended = experience.staleness, experience.response_attention
    if staleness is None:
        return {}
    changes = (staleness[:, 1:] != staleness[:, :-1]) & attended[:, 1:]
    versions = 1 + changes.sum(1)
    return {
        "rollout/stale_token_frac": masked_mean((staleness > 0).double(), experience.response_mask),
        "rollout/versions_mean": versions.double().mean(),
        "rollout/versions_max": versions.max(),
    }


def count_turns(feedback: Tensor, lengths: Tensor) -> Tensor:
    """Returns the number of turns per response, [B] long.

    A response begins with a turn, and another follows each block of True values in ``feedback`` [B,R].
    """
    begins = feedback & ~pad(feedback[:, :-1], (1, 0))
    return begins.sum(1) + (lengths > 0)


def histograms(experience: Experience) -> dict[str, Histogram]:
    """Returns histograms of the scores, the response lengths (tokens) and the advantages of the tokens."""
    columns = {
        "reward/score_hist": experience.scores,
        "rollout/resp_len_hist": experience.response_lengths.double(),
        "adv/hist": experience.advantages[experience.response_mask],
    }
    binned = {name: count_equal_bins(column) for name, column in columns.items()}
    return {
        name: Histogram(counts.tolist(), edges.tolist())
        for name, (counts, edges) in binned.items()
        if len(counts)
    }


def reference_log_ratio(experience: Experience) -> Tensor | None:
    """Computes log pi - log pi_ref [B,R], 0 outside the mask; None if either log-prob is missing."""
    if experience.logprobs is None or experience.ref_logprobs is None:
        return None
    return k1(experience.logprobs, experience.ref_logprobs).masked_fill(~experience.response_mask, 0.0)
