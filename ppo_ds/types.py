"""What flows through a PPO step. Data changes its *type* as it flows, and no field of a type is optional.

    Prompts -> Rollout -> ScoredRollout -> Experience -> minibatches of Experience

B sequences, P padded prompt width (left padding), R padded response width (right padding), T = P + R, S = R + 1.
Index t of a [B,R] tensor is the state *before* response token t is emitted; a [B,S] tensor has the state after the last token too.
Masks come from lengths and stop positions, never from ``ids != pad``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor

Row = dict[str, Any]  # one raw row of the data set


def _tensor(width: str) -> Any:
    """A tensor field of shape [B], [B,P], [B,T], [B,R] or [B,S]; the width is what trimming and padding go by."""
    return field(metadata={"width": width})


@dataclass(frozen=True)
class _Rows:
    """Frozen columns over the same B rows."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __post_init__(self) -> None:
        for f in fields(self):
            n = len(getattr(self, f.name))
            assert n == len(self), f"{type(self).__name__}.{f.name} has {n} rows, not {len(self)}"

    def select(self, index: Tensor) -> Self:
        """The rows at ``index`` (LongTensor [b]), in that order, uncut."""
        picked = {}
        for f in fields(self):
            column = getattr(self, f.name)
            picked[f.name] = (
                column[index.to(column.device)]
                if isinstance(column, Tensor)
                else tuple(column[i] for i in index.tolist())
            )
        return replace(self, **picked)


@dataclass(frozen=True)
class Prompts(_Rows):
    """Prompts ready to be continued, and the raw rows they came from, so that rewards can read a reference answer."""

    ids: Tensor = _tensor("P")  # [B,P] long, left-padded
    mask: Tensor = _tensor("P")  # [B,P] bool
    limits: Tensor = _tensor("B")  # [B] long: the most tokens that each answer may have
    metadata: tuple[Row, ...]  # B raw rows


@dataclass(frozen=True)
class Sequences(_Rows):
    """Prompt and response in one tensor: all that a model needs for a forward."""

    ids: Tensor = _tensor("T")  # [B,T] long
    attention_mask: Tensor = _tensor("T")  # [B,T] bool
    response_mask: Tensor = _tensor("R")  # [B,R] bool; 1 = an action of the policy, stop token included

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = {
            "T": self.ids.shape[1],
            "R": self.response_mask.shape[1],
            "S": self.response_mask.shape[1] + 1,
        }
        for f in fields(self):
            width = f.metadata.get("width")
            if width in widths:
                shape = tuple(getattr(self, f.name).shape)
                assert shape == (len(self), widths[width]), (
                    f"{type(self).__name__}.{f.name} is {shape}, not {(len(self), widths[width])}"
                )

    @property
    def response_width(self) -> int:
        return self.response_mask.shape[1]

    @property
    def prompt_width(self) -> int:
        return self.ids.shape[1] - self.response_width

    @property
    def prompt_lengths(self) -> Tensor:
        """[B] long."""
        return self.attention_mask[:, : self.prompt_width].sum(1)

    @property
    def response_lengths(self) -> Tensor:
        """[B] long: attended places after the prompt."""
        return self.attention_mask[:, self.prompt_width :].sum(1)

    def to(self, device: torch.device) -> Self:
        return replace(
            self,
            **{
                f.name: moved(getattr(self, f.name), device)
                for f in fields(self)
                if isinstance(getattr(self, f.name), Tensor)
            },
        )

    def trimmed(self) -> Self:
        """The same rows, cut to their own longest prompt and response (at least one place each)."""
        return self.resized(max(1, int(self.prompt_lengths.max())), max(1, int(self.response_lengths.max())))

    def resized(self, prompt_width: int, response_width: int) -> Self:
        """The same rows with other padding: prompts change on the left, responses on the right."""
        left, right = prompt_width - self.prompt_width, response_width - self.response_width
        pads = {"T": (left, right), "R": (0, right), "S": (0, right)}
        changed = {
            f.name: torch.nn.functional.pad(getattr(self, f.name), pads[f.metadata["width"]])
            for f in fields(self)
            if f.metadata.get("width") in pads
        }
        return replace(self, **changed)


def moved(column: Tensor, device: torch.device) -> Tensor:
    """From the CPU to a GPU the copy is only queued, from memory that the GPU reads by itself; any other memory would have the host wait."""
    return (
        column.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda" and column.device.type == "cpu"
        else column.to(device)
    )


@dataclass(frozen=True)
class Rollout(Sequences):
    """What the policy answered."""

    finished: Tensor = _tensor("B")  # [B] bool: ended with a stop; False = cut at the length limit
    limits: Tensor = _tensor("B")  # [B] long: the most tokens that the answer could have
    logprobs: Tensor = _tensor("R")  # [B,R] float32: as the decode backend saw them, 0 outside the mask
    metadata: tuple[Row, ...]  # B raw rows, those of the prompts


@dataclass(frozen=True)
class Scores:
    """What a reward says of B answers. Sequence-level rewards leave ``per_token`` at zero."""

    total: Tensor  # [B] float32
    per_token: Tensor  # [B,R] float32, 0 outside the mask
    components: dict[
        str, Tensor
    ]  # name -> [B] float32, logged as reward/component/<name>_mean; {} where there is one part only

    def __post_init__(self) -> None:
        for name, column in [("per_token", self.per_token), *self.components.items()]:
            assert len(column) == len(self.total), (
                f"Scores.{name} has {len(column)} rows, not {len(self.total)}"
            )


class Reward(Protocol):
    """r(x, y). Called on every rank with its own rows, the same number of times on each."""

    def __call__(self, rollout: Rollout) -> Scores: ...


@dataclass(frozen=True)
class ScoredRollout(Rollout):
    """What the policy answered, and what the reward says of it."""

    scores: Tensor = _tensor("B")  # [B] float32, as the reward gave them
    token_scores: Tensor = _tensor("R")  # [B,R] float32
    components: tuple[dict[str, float], ...]  # B: the parts of each score by name


@dataclass(frozen=True)
class Experience(Sequences):
    """What every policy learns from; all of it is constant while the minibatches pass.

    What the actor, the reference and a critic said of it stands in types of their own, for the algorithms that ask them; ``experience_of`` puts
    together those that are there.
    """

    finished: Tensor = _tensor("B")  # [B] bool
    decode_logprobs: Tensor = _tensor("R")  # [B,R] log pi(a|s) as the decode backend saw it
    rewards: Tensor = _tensor("S")  # [B,S]
    advantages: Tensor = _tensor("R")  # [B,R]
    weights: Tensor = _tensor("R")  # [B,R] importance weights of the decode backend; 1 = none
    scores: Tensor = _tensor("B")  # [B]


@dataclass(frozen=True)
class ActorExperience(Experience):
    """Where one optimizer step is all that a rollout gives, it is the first to ask the actor, and this is there only after it."""

    logprobs: Tensor = _tensor("R")  # [B,R] log pi(a|s) of the policy that answered, by the training engine
    old_logprobs: Tensor = _tensor(
        "R"
    )  # [B,R] log pi_old(a|s) of the ratio: the same, or those of a copy that lags behind


@dataclass(frozen=True)
class ReferenceExperience(Experience):
    """Nobody asks the reference where there is no KL."""

    ref_logprobs: Tensor = _tensor("R")  # [B,R] log pi_ref(a|s)


@dataclass(frozen=True)
class CriticExperience(Experience):
    """What a critic learns from."""

    values: Tensor = _tensor("S")  # [B,S] V(s), old
    returns: Tensor = _tensor("S")  # [B,S]
    value_mask: Tensor = _tensor("S")  # [B,S] bool: the states whose value is trained


def experience_of(**columns: Tensor) -> Experience:
    """The Experience with these columns: of all those types at once that the columns fill."""
    parts = (ActorExperience, ReferenceExperience, CriticExperience)
    return _joined(
        tuple(part for part in parts if {f.name for f in fields(part)} <= columns.keys()) or (Experience,)
    )(**columns)


@cache
def _joined(parts: tuple[type[Experience], ...]) -> type[Experience]:
    """One type for all of them; ``isinstance`` tells what is there."""
    return make_dataclass(
        "".join(part.__name__.removesuffix("Experience") for part in parts) + "Experience",
        [],
        bases=parts,
        frozen=True,
    )


Metrics = dict[str, float]  # METRIC name -> value: reduced over ranks, masked
