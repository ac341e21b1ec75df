"""Which decode backend a run takes: the first of its candidates that can decode the model and agrees with training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppo_ds.errors import UserError
from ppo_ds.ppo.parity import Gap, ParityError, disagreement


@dataclass(frozen=True)
class Choice:
    backend: str
    gap: Gap  # what the parity gate found of it
    incapable: tuple[str, ...]  # those before it that cannot decode this model, each with its reason
    unfit: tuple[str, ...]  # those before it whose log-probs are not those of training


def choose(
    candidates: Sequence[str],
    *,
    refusal: Callable[[str], str | None],
    gap_of: Callable[[str], Gap],
    dtype: str,
) -> Choice:
    """In the order given, and by nothing that changes from one start to the next: a resumed run decodes as it did.

    ``refusal``: why a backend cannot. UserError where the last candidate cannot, ParityError where it is out of bounds.
    ``gap_of`` may be a collective; ``refusal`` and ``gap_of`` must say the same on every rank.
    """
    incapable: list[str] = []
    unfit: list[str] = []
    for name in candidates:
        last, reason = name == candidates[-1], refusal(name)
        if reason is not None:
            if last:
                raise UserError(f"rollout.backend={name}: {reason}; use rollout.backend=auto")
            incapable.append(f"{name}: {reason}")
            continue
        gap = gap_of(name)
        wrong = disagreement(gap, dtype)
        if wrong is None:
            return Choice(name, gap, tuple(incapable), tuple(unfit))
        if last:
            raise ParityError(f"{wrong}; rollout.backend={name} does not decode with the model that trains")
        unfit.append(f"{name}: {wrong}")
    raise AssertionError("no candidates")
