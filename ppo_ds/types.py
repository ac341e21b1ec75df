"""Defines the data types of a training step, in the order in which a PPO step produces them:

    Prompts -> Rollout -> ScoredRollout -> Experience -> minibatches of Experience

Shapes: B sequences, P padded prompt width (left padding), R padded response width (right padding), T = P + R,
S = R + 1. Column t of a [B,R] tensor belongs to the state *before* response token t is emitted. A [B,S]
tensor has one more column, for the state after the last token. Masks are computed from lengths and stop
positions, never from ``ids != pad``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

Row = dict[str, Any]  # one raw row of the data set
Metrics = dict[str, float]  # metric name -> value, masked and already reduced over ranks

# Reasons for the end of a response with an environment: the environment was done; the policy took the last
# turn; a turn or the feedback reached the limit of tokens; a call of the environment failed, or exceeded its
# time limit
ENDS = DONE, TURNS, LENGTH, ERROR, TIMEOUT = "done", "turns", "length", "error", "timeout"


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins. Bin i holds the values from edges[i] up to edges[i+1]."""

    counts: list[int]
    edges: list[float]  # one more than counts

    def __post_init__(self) -> None:
        assert len(self.edges) == len(self.counts) + 1, (len(self.edges), len(self.counts))


# Field metadata that declares the shape of a tensor column as [B], [B,P], [B,T], [B,R] or [B,S]. Trimming and
# padding depend on it.
_B, _P, _T, _R, _S = ({"width": name} for name in "BPTRS")


@dataclass(frozen=True)
class _Rows:
    """Base class of data with B rows.

    Columns cannot be reassigned. A column is a tensor, with its width declared in the field's metadata, or a
    tuple of Python objects.
    """

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __post_init__(self) -> None:
        for name, column in (self.tensors() | self.objects()).items():
            assert len(column) == len(self), (
                f"{type(self).__name__}.{name} has {len(column)} rows, not {len(self)}"
            )

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensor columns by name, without those that are None."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if "width" in f.metadata}
        return {name: column for name, column in columns.items() if column is not None}

    def objects(self) -> dict[str, tuple[Any, ...]]:
        """Returns the columns that hold one Python object per row, by name, without those that are None."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if "width" not in f.metadata}
        return {name: column for name, column in columns.items() if column is not None}

    def select(self, index: Tensor) -> Self:
        """Returns the rows at ``index`` (LongTensor [b]), in that order, with unchanged widths."""
        tensors = {name: column[index.to(column.device)] for name, column in self.tensors().items()}
        objects = {name: tuple(column[i] for i in index.tolist()) for name, column in self.objects().items()}
        return replace(self, **tensors, **objects)


@dataclass(frozen=True)
class Prompts(_Rows):
    """Prompts to generate responses for.

    ``metadata`` holds the rows of the data set, for example with a reference answer for rewards.
    data/prompts.py adds reserved keys to each row, such as prompt_text, the prompt before truncation. ``ids``
    are the tokens that the policy receives.
    """

    ids: Tensor = field(metadata=_P)  # [B,P] long, left-padded
    mask: Tensor = field(metadata=_P)  # [B,P] bool
    limits: Tensor = field(metadata=_B)  # [B] long: the maximum number of tokens of each response
    metadata: tuple[Row, ...]  # B rows
    # [B] long: seeds for sampling tokens; None: torch's random state is used
    seeds: Tensor | None = field(default=None, metadata=_B)


@dataclass(frozen=True)
class Sequences(_Rows):
    """Prompts and responses in one tensor, with the masks that a forward pass needs."""

    ids: Tensor = field(metadata=_T)  # [B,T] long
    attention_mask: Tensor = field(metadata=_T)  # [B,T] bool
    # [B,R] bool: True for the tokens in the loss, which are actions of the policy (see algo.train_on_eos) or
    # trained tokens of a text
    response_mask: Tensor = field(metadata=_R)
    # [B,R] bool: True for attended tokens that an environment added between two turns of the policy; None
    # without an environment (environments/multi_turn.py)
    feedback_mask: Tensor | None = field(default=None, kw_only=True, metadata=_R)
    # [B,R] long: the number of optimizer steps of the actor since each token was sampled; None unless
    # responses are continued with newer weights (rollout.partial)
    staleness: Tensor | None = field(default=None, kw_only=True, metadata=_R)

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.response_mask.shape[1]
        widths = {"T": self.ids.shape[1], "R": width, "S": width + 1}
        declared = {f.name: widths.get(f.metadata.get("width", "")) for f in fields(self)}
        for name, column in self.tensors().items():
            expected = (len(self), declared[name])
            assert declared[name] is None or tuple(column.shape) == expected, (
                f"{type(self).__name__}.{name} is {tuple(column.shape)}, not {expected}"
            )

    @property
    def response_width(self) -> int:
        return self.response_mask.shape[1]

    @property
    def prompt_width(self) -> int:
        return self.ids.shape[1] - self.response_width

    @property
    def prompt_lengths(self) -> Tensor:
        """Number of attended prompt tokens, [B] long."""
        return self.attention_mask[:, : self.prompt_width].sum(1)

    @property
    def response_ids(self) -> Tensor:
        """The columns after the prompt, [B,R] long."""
        return self.ids[:, self.prompt_width :]

    @property
    def response_attention(self) -> Tensor:
        """Attended positions after the prompt, [B,R] bool, including end tokens that are not actions."""
        return self.attention_mask[:, self.prompt_width :]

    @property
    def response_lengths(self) -> Tensor:
        """Number of attended tokens after the prompt, [B] long."""
        return self.response_attention.sum(1)

    @property
    def generated_lengths(self) -> Tensor:
        """Number of tokens that the policy generated, [B] long, without the feedback of an environment."""
        if self.feedback_mask is None:
            return self.response_lengths
        return self.response_lengths - self.feedback_mask.sum(1)

    def to(self, device: torch.device) -> Self:
        """Returns the same rows with all tensors on ``device``."""
        return replace(self, **{name: to_device(column, device) for name, column in self.tensors().items()})

    def trimmed(self) -> Self:
        """Returns the same rows, trimmed to the longest prompt and response (at least one token each)."""
        return self.resized(max(1, int(self.prompt_lengths.max())), max(1, int(self.response_lengths.max())))

    def resized(self, prompt_width: int, response_width: int) -> Self:
        """Returns the same rows with prompts padded or cut on the left and responses on the right."""
        left, right = prompt_width - self.prompt_width, response_width - self.response_width
        pads = {"T": (left, right), "R": (0, right), "S": (0, right)}
        tensors, widths = self.tensors(), {f.name: f.metadata.get("width", "") for f in fields(self)}
        changed = {
            name: pad(column, pads[widths[name]]) for name, column in tensors.items() if widths[name] in pads
        }
        return replace(self, **changed)


def to_device(column: Tensor, device: torch.device) -> Tensor:
    """Returns ``column`` on ``device``; a copy from the CPU to a GPU is pinned and asynchronous."""
    if device.type == "cuda" and column.device.type == "cpu":
        # torch cannot pin an expanded tensor: the pinned copy would have the same overlapping strides
        return column.contiguous().pin_memory().to(device, non_blocking=True)
    return column.to(device)


@dataclass(frozen=True)
class Rollout(Sequences):
    """Prompts with the responses that the policy generated.

    With an environment, a response holds all turns of the policy and the feedback between them.
    """

    # [B] bool: True if the response ended with a stop, False if it reached its limit or the backend cut it.
    # With an environment: True if the environment ended the episode
    finished: Tensor = field(metadata=_B)
    limits: Tensor = field(metadata=_B)  # [B] long: the maximum number of tokens of each response
    # [B,R] float32: log-probs computed by the decode backend, 0 outside the mask. They are used for the
    # parity check at start-up (ppo/health.py), the metrics parity/* and algo.rollout_is, and with
    # algo.old_logprobs=rollout as old log-probs, which otherwise come from the training engine.
    logprobs: Tensor = field(metadata=_R)
    metadata: tuple[Row, ...]  # B rows, the metadata of the prompts

    # the rewards and the ends of the episodes of an environment; None without one
    # [B,R] float32: the reward of each turn, at the last token of the turn
    turn_rewards: Tensor | None = field(default=None, kw_only=True, metadata=_R)
    # B reasons, each one of ENDS
    episode_ends: tuple[str, ...] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Scores:
    """Scores of B responses. Sequence-level rewards have ``per_token`` = 0, step rewards ``total`` = 0."""

    total: Tensor  # [B] float32
    per_token: Tensor  # [B,R] float32, 0 outside the mask
    # name -> [B] float32, logged as reward/component/<name>_mean; {} if the score has one part only
    components: dict[str, Tensor]
    # a greedy response to each prompt, with its score (ReMax); None: not generated
    greedy: ScoredRollout | None = None

    def __post_init__(self) -> None:
        for name, column in [("per_token", self.per_token), *self.components.items()]:
            assert len(column) == len(self.total), (
                f"Scores.{name} has {len(column)} rows, not {len(self.total)}"
            )

    @property
    def sums(self) -> Tensor:
        """The whole score of each response: ``total`` and the scores of all tokens, [B]."""
        return self.total + self.per_token.sum(1)


class Reward(Protocol):
    """Computes the scores r(x, y) of responses.

    All ranks must call a reward equally often, each with its own rows.
    """

    def __call__(self, rollout: Rollout) -> Scores: ...


@dataclass(frozen=True)
class ScoredRollout(Rollout):
    """A rollout with the scores of its responses."""

    scores: Tensor = field(metadata=_B)  # [B] float32, as the reward returned them
    token_scores: Tensor = field(metadata=_R)  # [B,R] float32
    components: tuple[dict[str, float], ...]  # B dicts: name -> part of the score
    # [B] shaped score of the greedy response to the same prompt (ReMax); None: not generated
    baselines: Tensor | None = field(default=None, metadata=_B)

    @property
    def score_sums(self) -> Tensor:
        """The whole score of each response: ``scores`` and the scores of all tokens, [B]."""
        return self.scores + self.token_scores.sum(1)


@dataclass(frozen=True)
class Experience(Sequences):
    """The training data of one PPO step, with the rows of all ranks; the same in all epochs.

    Columns that a run does not need are None.
    """

    # the rollout
    finished: Tensor = field(metadata=_B)  # [B] bool: True if the response ended with a stop
    decode_logprobs: Tensor = field(metadata=_R)  # [B,R] log pi(a|s) as computed by the decode backend
    # [B,R] importance weights that correct for the decode backend (algo.rollout_is); 1 = no correction
    weights: Tensor = field(metadata=_R)

    # rewards and advantages
    scores: Tensor = field(metadata=_B)  # [B] as the reward returned them, per-token scores included
    rewards: Tensor = field(metadata=_S)  # [B,S] shaped scores, minus any KL penalty
    advantages: Tensor = field(metadata=_R)  # [B,R]

    # log-probs computed by the training engines. Those of the actor are None if the update computes them, and
    # equal those of the decode backend with algo.old_logprobs=rollout
    # [B,R] log pi(a|s) of the actor before the update
    logprobs: Tensor | None = field(default=None, metadata=_R)
    # [B,R] log pi_old(a|s): equal to ``logprobs``, or computed by a lagging copy of the actor
    old_logprobs: Tensor | None = field(default=None, metadata=_R)
    # [B,R] log pi_ref(a|s); None without a reference
    ref_logprobs: Tensor | None = field(default=None, metadata=_R)
    # [B,R] entropy of the actor before the update; None unless algo.policy.top_entropy needs it
    entropy: Tensor | None = field(default=None, metadata=_R)
    # [B,R] bool: tokens selected for the policy loss in an optimizer step (PolicyConfig.selection); None
    # until the optimizer step selects them, and for losses without a selection
    selected: Tensor | None = field(default=None, metadata=_R)

    # the critic's columns; None in a run without a critic
    values: Tensor | None = field(default=None, metadata=_S)  # [B,S] V(s) before the update
    returns: Tensor | None = field(default=None, metadata=_S)  # [B,S]
    # [B,S] bool: the states whose value is trained
    value_mask: Tensor | None = field(default=None, metadata=_S)

    # B dicts for the sample rows: "components" (name -> part of the score), unless the score has one part
    # only, and with an environment "episode_end", one of ENDS. None if both are absent
    notes: tuple[dict[str, Any], ...] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class PreferencePairs(_Rows):
    """Pairs of a preferred and a rejected text, the training data of a reward model.

    The second dimension of ``ids`` and ``mask`` is 0 for the preferred and 1 for the rejected text.
    """

    ids: Tensor = field(metadata=_T)  # [B,2,T] long, right-padded
    mask: Tensor = field(metadata=_T)  # [B,2,T] bool
    margins: Tensor = field(metadata=_B)  # [B] float32: minimum difference of the two scores; 0: no minimum
    counted: Tensor = field(metadata=_B)  # [B] bool: False for pairs without a loss, which only fill a batch

    def filled(self, ranks: int) -> Self:
        """Appends copies of the last pair until ``ranks`` divides the number of pairs.

        The copies have no loss.
        """
        count, missing = len(self), -len(self) % ranks
        pairs = self.select(torch.cat([torch.arange(count), torch.full((missing,), count - 1)]))
        return replace(pairs, counted=pairs.counted & (torch.arange(len(pairs)) < count))

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each text, [B,2] long."""
        return self.mask.sum(2)

    def trimmed(self) -> Self:
        """Returns the same pairs without the columns that are padding in every row."""
        width = int(self.lengths.max())
        return replace(self, ids=self.ids[..., :width], mask=self.mask[..., :width])
