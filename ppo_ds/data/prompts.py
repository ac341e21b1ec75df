"""Prompts ready to be continued, in one global order that does not depend on the number of ranks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ppo_ds.data.messages import Prompt, limit_of, prompt_of, reading_for
from ppo_ds.data.order import Order, Passes
from ppo_ds.data.rows import load_rows, read_rows
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.types import Prompts, Row

ROWS, CHARACTERS = (
    1000,
    1_000_000,
)  # tokenised at a time: ids that are not cut yet take some hundred bytes each
ID_COLUMN = "id"


class PromptSource:
    """The prompts of a data set, checked and tokenised once, on every rank alike.

    Chats go through the tokenizer's chat template, and so do text prompts where there is one: a chat model is not trained on bare text.
    A prompt of more than ``max_prompt_tokens`` is dropped, or cut on the left: on the right would remove the place where the answer begins.
    An answer may have as many tokens as its row's column "max_new_tokens" says, and never more than the run's ``max_new_tokens``.

    ``report``: {"rows": read, "truncated": cut on the left, "dropped": left out, "lowered": that asked for longer answers than the run
    allows, "repeated": kept with the very ids of an earlier one, "same_id": kept with the "id" of an earlier one}; ``len(source)`` is rows - dropped.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer: Tokenizer,
        max_new_tokens: int,
        split: str = "train",
        revision: str | None = None,
        prompt_column: str | None = None,
        text_as_chat: bool | None = None,
        system: str | None = None,
        max_samples: int | None = None,
        max_prompt_tokens: int = 512,
        long_prompts: str = "truncate_left",
        key: str = "data.path",
    ):
        """``text_as_chat``: whether a text prompt is a user's message; None: where the tokenizer has a chat template. ``system``: a system
        message for chats that have none. ``max_samples``: the first rows only. ``key``: the path's, for errors."""
        self.path, self.key = path, key
        self.pad_id, self._tokenizer = tokenizer.pad_id, tokenizer
        self._reading = reading_for(tokenizer, prompt_column, text_as_chat, system, key)
        self._rows = load_rows(path, split=split, revision=revision, max_rows=max_samples, key=key)
        asked = read_rows(self._rows, self._checked)
        prompts, limits = [prompt for prompt, _, _ in asked], [limit for _, limit, _ in asked]
        names = [name for _, _, name in asked if name is not None]
        self._kept = array("I")  # index of each kept prompt's row
        self._starts = array("L", [0])  # where each kept prompt's ids begin; last: where they end
        self._ids = array("I")  # the ids of all kept prompts, one after the other
        self._limits = array("L")  # the most new tokens of each kept prompt
        self._kinds: dict[
            tuple[str, ...], int
        ] = {}  # roles of a chat, () for a text -> the first kept prompt like that
        self.report = {
            "rows": len(prompts),
            "truncated": 0,
            "dropped": 0,
            "lowered": 0,
            "repeated": 0,
            "same_id": len(names) - len(set(names)),
        }
        for part in chunks([size_of(prompt) for prompt in prompts]):
            for i, ids in enumerate(self._encode(prompts[part], part.start), start=part.start):
                if self._add(i, ids, max_prompt_tokens, long_prompts):
                    self._limits.append(min(limits[i] or max_new_tokens, max_new_tokens))
                    self.report["lowered"] += (limits[i] or 0) > max_new_tokens
                    self._kinds.setdefault(_roles(prompts[i]), len(self) - 1)
        self.report["repeated"] = len(self) - len(
            {hash(self._ids[start:end].tobytes()) for start, end in pairwise(self._starts)}
        )
        if not len(self):
            raise UserError(
                f"{key}={path}: all {len(prompts)} prompts are dropped: they have more than data.max_prompt_tokens={max_prompt_tokens} tokens; "
                "raise it, or set data.long_prompts=truncate_left"
            )

    def _checked(self, row: Row) -> tuple[Prompt, int | None, str | None]:
        """What can be said of a row before anything is tokenised: its prompt, the limit and the name that it gives itself."""
        prompt = prompt_of(row, self._reading)
        if not isinstance(prompt, str) and not self._tokenizer.has_chat_template:
            self._tokenizer.render_chat(prompt)  # says what is missing
        return prompt, limit_of(row), None if row.get(ID_COLUMN) is None else str(row[ID_COLUMN])

    def _encode(self, chunk: list[Prompt], start: int) -> list[list[int]]:
        texts = [self._rendered(prompt, start + i) for i, prompt in enumerate(chunk)]
        return encode(
            self._tokenizer, texts, [isinstance(prompt, str) for prompt in chunk]
        )  # a template writes its own special tokens

    def _rendered(self, prompt: Prompt, row: int) -> str:
        if isinstance(prompt, str):
            return prompt
        try:
            return self._tokenizer.render_chat(prompt)
        except UserError as error:
            raise UserError(f"{self._rows.place(row)}: {error}") from error

    def _add(self, row: int, ids: list[int], limit: int, long_prompts: str) -> bool:
        """Keep the row's prompt; False where it is dropped."""
        if not ids:
            raise UserError(f"{self._rows.place(row)}: the prompt has no tokens")
        if len(ids) > limit:
            if long_prompts == "drop":
                self.report["dropped"] += 1
                return False
            self.report["truncated"] += 1
            ids = ids[-limit:]
        self._kept.append(row)
        self._ids.extend(ids)
        self._starts.append(len(self._ids))
        return True

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(end - start for start, end in pairwise(self._starts))

    def order(self, seed: int, shuffle: bool) -> Order:
        """Which prompt comes at which place, pass after pass."""
        return Passes(len(self), seed, shuffle)

    def _metadata(self, i: int) -> Row:
        """The raw row and the reserved keys: "prompt_text", the uncut prompt as text, and "messages", for a chat only.

        A row's own column of such a name gives way, so that the keys mean the same in every row. "data_source" is the path that the row came
        from, unless the row itself says where.
        """
        row = self._rows[self._kept[i]]
        prompt = prompt_of(row, self._reading)
        kept = {"data_source": self.path} | {name: value for name, value in row.items() if name != "messages"}
        if isinstance(prompt, str):
            return kept | {"prompt_text": prompt}
        return kept | {"prompt_text": self._tokenizer.render_chat(prompt), "messages": prompt}

    def examples(self) -> list[tuple[str, Row]]:
        """Place and metadata of one prompt for each order of roles that there is: what a chat template may refuse."""
        return [(self._rows.place(self._kept[i]), self._metadata(i)) for i in self._kinds.values()]

    def expect(self, judged: Callable[[Row], object]) -> None:
        """UserError with the places of those kept rows for which ``judged`` raises one."""
        read_rows(self._rows, judged, self._kept)

    def row(self, i: int) -> tuple[Sequence[int], int, Row]:
        """Ids, limit and metadata of a prompt."""
        return self._ids[self._starts[i] : self._starts[i + 1]], self._limits[i], self._metadata(i)

    def batch(self, indices: Sequence[int]) -> Prompts:
        """Prompts at ``indices``, left-padded to their own longest."""
        return padded([self.row(i) for i in indices], self.pad_id)


def size_of(prompt: Prompt) -> int:
    """Characters, without a template's."""
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


def _roles(prompt: Prompt) -> tuple[str, ...]:
    return () if isinstance(prompt, str) else tuple(message["role"] for message in prompt)


def chunks(sizes: Sequence[int]) -> Iterator[slice]:
    """Texts of ``sizes`` characters, so many at a time that their ids take little memory: one at least."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and (i - start == ROWS or total + size > CHARACTERS):
            yield slice(start, i)
            start, total = i, 0
        total += size
    yield slice(start, len(sizes))


def encode(tokenizer: Tokenizer, texts: Sequence[str], special_tokens: Sequence[bool]) -> list[list[int]]:
    """Ids of each text, with or without the special tokens that the tokenizer adds by itself."""
    ids: list[list[int]] = [[]] * len(texts)
    for special in (True, False):
        places = [i for i, wanted in enumerate(special_tokens) if wanted == special]
        for i, encoded in zip(
            places, tokenizer.encode_many([texts[i] for i in places], special_tokens=special), strict=True
        ):
            ids[i] = encoded
    return ids


def padded(rows: Sequence[tuple[Sequence[int], int, Row]], pad_id: int) -> Prompts:
    """Ids, limits and metadata as one batch."""
    ids, limits, metadata = zip(*rows, strict=True)
    return Prompts(*_left_padded(ids, pad_id), torch.tensor(limits), metadata)


def _left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """ids [B,P] long and mask [B,P] bool; the mask comes from the lengths, so that a pad id inside a prompt stays attended."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    for out, row in zip(ids, rows, strict=True):
        out[width - len(row) :] = torch.tensor(row, dtype=torch.long)
    return ids, torch.arange(width) >= width - lengths[:, None]


class Source(Protocol):
    """A set of prompts, or several that are mixed."""

    path: str
    key: str
    report: dict[str, int]

    def __len__(self) -> int: ...
    @property
    def longest(self) -> int: ...
    def batch(self, indices: Sequence[int]) -> Prompts: ...
    def order(self, seed: int, shuffle: bool) -> Order: ...
    def examples(self) -> list[tuple[str, Row]]: ...
    def expect(self, judged: Callable[[Row], object]) -> None: ...


class PromptStream:
    """Endless steps of prompts: each rank its contiguous slice of ``prompts_per_step`` x ``samples_per_prompt`` rows, in the order p1, p1, p2, p2.

    Every pass over the source has its own order, seeded with seed + pass. Prompts that do not fill a step at a pass's end begin the next step.
    Slices are padded on their own: put together in the order of the ranks they are the single rank's batch, up to padding.
    """

    def __init__(
        self,
        source: Source,
        *,
        prompts_per_step: int,
        samples_per_prompt: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ):
        rows = prompts_per_step * samples_per_prompt
        if len(source) < prompts_per_step:
            raise UserError(
                f"{source.key}={source.path}: {len(source)} prompts are fewer than one step takes (rollout.prompts_per_step={prompts_per_step}); "
                f"set rollout.prompts_per_step to at most {len(source)}, or add data"
            )
        if rows % world_size:
            raise UserError(
                f"rollout.prompts_per_step={prompts_per_step} x rollout.samples_per_prompt={samples_per_prompt} = {rows} rows "
                f"cannot be split evenly over {world_size} ranks"
            )
        self._source, self._prompts, self._samples = source, prompts_per_step, samples_per_prompt
        self._slice = slice(rank * rows // world_size, (rank + 1) * rows // world_size)
        self._order = source.order(seed, shuffle)
        self._step = 0

    @property
    def steps_per_epoch(self) -> float:
        return len(self._source) / self._prompts

    @property
    def epoch(self) -> float:
        """Passes over the source so far."""
        return self._step / self.steps_per_epoch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prompts:
        first = self._step * self._prompts
        order = [
            self._order[place] for place in range(first, first + self._prompts) for _ in range(self._samples)
        ]
        self._step += 1
        return self._source.batch(order[self._slice])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]


def eval_batches(
    source: Source, *, rank: int, world_size: int, rows_per_batch: int, max_prompts: int | None = None
) -> list[tuple[Prompts, Tensor]]:
    """The first ``max_prompts`` prompts, split over the ranks: per batch of at most ``rows_per_batch`` rows the prompts and weights [b] float32.

    Every rank gets the same number of batches of the same sizes, since generating is collective under ZeRO-3. The last prompt is repeated to
    fill them up, with weight 0.
    """
    n = len(source) if max_prompts is None else min(max_prompts, len(source))
    per_rank = -(-n // world_size)
    batches = []
    for start in range(0, per_rank, rows_per_batch):
        places = [rank * per_rank + i for i in range(start, min(start + rows_per_batch, per_rank))]
        weights = torch.tensor([float(place < n) for place in places])
        batches.append((source.batch([min(place, n - 1) for place in places]), weights))
    return batches
