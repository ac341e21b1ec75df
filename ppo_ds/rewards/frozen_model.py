"""Base class of rewards that score responses with a frozen model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, SupportsInt

import torch
from torch import Tensor, nn

from ppo_ds.config.sections.models import FrozenZeroConfig, ModelConfig
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import Responses, RewardError, TextReward, quoted
from ppo_ds.types import Row

REPLICA = FrozenZeroConfig()  # the default: each rank has a full copy of the model


class FrozenScorer(Protocol):
    """A frozen model run by the engine; between uses, it may be offloaded to CPU memory or sharded."""

    def resident(self) -> AbstractContextManager[None]: ...

    def __call__(self, *inputs: Any, **options: Any) -> Tensor: ...


# (loader, model section, ZeRO section, key for errors) -> (module, scorer that runs it in the engine)
LoadFrozen = Callable[
    [Callable[..., nn.Module], ModelConfig, FrozenZeroConfig, str], tuple[Any, FrozenScorer]
]


@dataclass(eq=False)
class FrozenModelReward(TextReward):
    """Base class of rewards that encode each response, score it with a frozen model and check the scores.

    Subclasses implement ``encode``, which converts a response to an input of the model, and ``score``.
    """

    scorer: FrozenScorer
    _: KW_ONLY
    tokenizer: Tokenizer  # the actor's
    token_budget: SupportsInt  # maximum tokens per forward, padding included; read at each use
    key: str  # the reward's section, for errors
    name: str  # the model's KEY=PATH, for errors

    @abstractmethod
    def encode(self, row: Row, response: str, finished: bool) -> Any:
        """Encodes a response and its row as an input of the model."""

    @abstractmethod
    def score(self, inputs: Sequence[Any]) -> Tensor:
        """Scores inputs in batches within the token budget, [B]; scores may be non-finite."""

    def score_responses(self, responses: Responses) -> Tensor:
        given = zip(responses.rows, responses.texts, responses.finished, strict=True)
        scores = self.score([self.encode(*each) for each in given])
        if not scores.isfinite().all():
            row = int((~scores.isfinite()).nonzero()[0])
            raise RewardError(
                f"the reward model scored {scores[row]} for row {row}, response "
                f"{quoted(responses.texts[row])}; try {self.key}.model.dtype=fp32"
            )
        return scores

    def _score_in_batches(
        self, inputs: Sequence[Any], batches: list[Tensor], forward: Callable[[list[Any]], Tensor]
    ) -> Tensor:
        """Runs ``forward`` on each batch (row indices) and returns the scores in input order, [B]."""
        scores = torch.zeros(len(inputs))
        with self.scorer.resident():
            parts = [forward([inputs[i] for i in rows.tolist()]) for rows in batches]
            scores[torch.cat(batches)] = torch.cat(parts).cpu()  # the only GPU synchronization
        return scores
