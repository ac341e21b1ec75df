"""Batches of successive steps from a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from ppo_ds.data.order import Order
from ppo_ds.errors import UserError

Batch = TypeVar("Batch")
Batch_co = TypeVar("Batch_co", covariant=True)


class StreamSource(Protocol[Batch_co]):
    """A data set from which batches are taken at given indices."""

    key: str
    unit: str  # word for the counted items, for error messages
    max_tokens_key: str  # config key of the length above which rows are dropped

    @property
    def path(self) -> str: ...
    @property
    def report(self) -> dict[str, int]: ...
    def __len__(self) -> int: ...
    def batch(self, indices: Sequence[int]) -> Batch_co: ...
    def order(self, seed: int, shuffle: bool) -> Order: ...


S = TypeVar("S", bound=StreamSource[Any])


class Stream(Generic[S, Batch]):
    """Yields batches of ``batch_size`` indefinitely, the whole batch on every rank.

    With ``shuffle``, each pass over the source is shuffled with the seed ``seed`` + number of the pass. Items
    left over at the end of a pass begin the next batch. ``key`` is the config key of ``batch_size``.
    """

    def __init__(self, source: S, *, batch_size: int, key: str, seed: int = 0, shuffle: bool = True):
        if len(source) < batch_size:
            dropped = source.report["dropped"]
            raise UserError(
                f"{source.key}={source.path}: {len(source)} {source.unit} are fewer than one step takes "
                f"({key}={batch_size}); set {key} to at most {len(source)}, or add data"
                + (f" ({dropped} more are dropped: raise {source.max_tokens_key})" if dropped else "")
            )
        self.source, self._batch_size = source, batch_size
        self._order = source.order(seed, shuffle)
        self._step = 0

    @property
    def epoch(self) -> float:
        """The number of passes over the source so far."""
        return self._step * self._batch_size / len(self.source)

    def indices(self, step: int) -> list[int]:
        """Returns the indices of the batch of ``step``, counted from 0."""
        first = step * self._batch_size
        return [self._order[i] for i in range(first, first + self._batch_size)]

    def __iter__(self) -> Self:
        return self

    def next_indices(self) -> list[int]:
        """Returns the indices of the next batch and advances by one batch."""
        self._step += 1
        return self.indices(self._step - 1)

    def __next__(self) -> Batch:
        return self.source.batch(self.next_indices())

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
