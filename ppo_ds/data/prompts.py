"""Prompts as token ids, in one global order that does not depend on the number of ranks."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ppo_ds.config.sections.data import PPODataConfig
from ppo_ds.config.text import show
from ppo_ds.data.difficulty import Difficulty
from ppo_ds.data.fingerprint import Fingerprint
from ppo_ds.data.messages import Prompt, parse_max_new_tokens, parse_prompt, prompt_format
from ppo_ds.data.order import Order, Passes
from ppo_ds.data.reasoning_gym import task_rows
from ppo_ds.data.rows import existing_file, load_rows, map_rows, parse_rows
from ppo_ds.data.sharing import encode_rows
from ppo_ds.data.stream import Stream, StreamSource
from ppo_ds.data.token_rows import Piece, TokenRows, num_characters
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ops.sequences import pad_rows
from ppo_ds.types import Prompts, Row

if TYPE_CHECKING:
    from ppo_ds.distributed.world import World

ID_COLUMN = "id"
MAX_VALUES = 50  # maximum number of values of a column by which an evaluation groups its rows
NO_VALUE = "(none)"  # the value of rows without the column
SHORT = 200  # maximum number of characters of a value by which rows are grouped
# the keys of ``PromptSource.report``
COUNTED = ("rows", "truncated", "dropped", "lowered", "repeated", "same_id", "unknown")


class _ParsedRow(NamedTuple):
    prompt: Prompt
    limit: int | None  # maximum number of response tokens
    name: str | None  # value of the column "id"


class PromptSource:
    """Holds the prompts of a data set, checked and tokenized, identically on every rank.

    Chats are rendered by the tokenizer's chat template; by default, text prompts are too if there is a
    template. A prompt of more than data.max_prompt_tokens tokens is dropped or truncated on the left,
    depending on data.long_prompts. A row's column "max_new_tokens" can lower ``max_new_tokens`` for its
    response.

    ``report`` counts the "rows" that were read, those "dropped", and those with the "id" of an earlier row
    ("same_id"). It also counts the kept rows (in all ``len(source)``) that are "truncated", have a response
    limit above ``max_new_tokens`` ("lowered"), have the prompt ids of an earlier row ("repeated"), or contain
    an unknown token ("unknown").

    ``data`` is the section data; its path, split and max_samples are ignored in favour of the arguments. The
    first ``max_samples`` rows are read (None: all). ``key`` is the config key of ``path``. The ranks of
    ``world`` share the tokenization, and all must call this; None: a single process.
    """

    unit = "prompts"
    max_tokens_key = "data.max_prompt_tokens"

    def __init__(
        self,
        path: str,
        *,
        data: PPODataConfig,
        tokenizer: Tokenizer,
        max_new_tokens: int,
        split: str = "train",
        max_samples: int | None = None,
        key: str = "data.path",
        world: World | None = None,
    ):
        self.path = path = existing_file(path, data.revision, world)
        self.key, self.pad_id, self._tokenizer = key, tokenizer.pad_id, tokenizer
        self._format = prompt_format(tokenizer, data, key)
        self._rows = load_rows(
            path,
            split=split,
            revision=data.revision,
            max_rows=max_samples,
            key=key,
            task=task_rows(data).get(key),
            world=world,
        )
        self._kept = array("I")  # the index of each kept prompt's row
        self._ids = TokenRows()  # token ids of the kept prompts
        self._limits = array("L")  # the limit of response tokens of each kept prompt
        # roles of a chat, or () for a text -> the first kept prompt with these roles
        self._first_with_roles: dict[tuple[str, ...], int] = {}
        parsed, self._fingerprint = parse_rows(world, self._rows, self._parse, key, path)
        prompts = [row.prompt for row in parsed]
        names = [row.name for row in parsed if row.name is not None]
        counts = Counter(rows=len(parsed), same_id=len(names) - len(set(names)))
        sizes = [num_characters(prompt) for prompt in prompts]
        encoded = encode_rows(
            world, tokenizer, self._rows, sizes, lambda i: [Piece.of(prompts[i], tokenizer)]
        )
        for i, ids in enumerate(encoded):
            if len(ids) > data.max_prompt_tokens:
                if data.long_prompts == "drop":
                    counts["dropped"] += 1
                    continue
                counts["truncated"] += 1
                ids = ids[-data.max_prompt_tokens :]
            prompt, limit, _ = parsed[i]
            roles = () if isinstance(prompt, str) else tuple(message["role"] for message in prompt)
            self._first_with_roles.setdefault(roles, len(self))
            self._kept.append(i)
            self._ids.append(ids)
            self._limits.append(min(limit or max_new_tokens, max_new_tokens))
            counts["lowered"] += (limit or 0) > max_new_tokens
        counts["repeated"] = len(self) - len({hash(ids.tobytes()) for ids in self._ids})
        counts["unknown"] = tokenizer.count_unknown(self._ids)
        self.report = {name: counts[name] for name in COUNTED}
        if not len(self):
            raise UserError(
                f"{key}={path}: all {len(parsed)} prompts are dropped: they have more than "
                f"data.max_prompt_tokens={data.max_prompt_tokens} tokens; raise it, or set "
                "data.long_prompts=truncate_left"
            )

    def _parse(self, row: Row) -> _ParsedRow:
        prompt = parse_prompt(row, self._format)
        if not isinstance(prompt, str) and not self._tokenizer.has_chat_template:
            self._tokenizer.render_chat(prompt)  # raises UserError for a chat without a template
        name = None if row.get(ID_COLUMN) is None else str(row[ID_COLUMN])
        return _ParsedRow(prompt, parse_max_new_tokens(row), name)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def fingerprints(self) -> list[Fingerprint]:
        """The fingerprint of the data set, in a list, since a mixture has one for each set."""
        return [self._fingerprint]

    @property
    def longest(self) -> int:
        return self._ids.longest

    def order(self, seed: int, shuffle: bool) -> Order:
        return Passes(len(self), seed, shuffle)

    def _metadata(self, i: int) -> Row:
        """Returns the raw row with the reserved keys "prompt_text" and, for chats, "messages".

        "prompt_text" is the prompt before truncation. "data_source" is the path of the data set unless the
        row has a column "data_source".
        """
        row = self._rows[self._kept[i]]
        prompt = parse_prompt(row, self._format)
        kept = {"data_source": self.path} | {name: value for name, value in row.items() if name != "messages"}
        if isinstance(prompt, str):
            return kept | {"prompt_text": prompt}
        return kept | {"prompt_text": self._tokenizer.render_chat(prompt), "messages": prompt}

    def examples(self) -> list[tuple[str, Row]]:
        """Returns the location and metadata of one prompt for each sequence of roles.

        They are used to test the chat template of a reward model, which may refuse some sequences.
        """
        return [
            (self._rows.location(self._kept[i]), self._metadata(i)) for i in self._first_with_roles.values()
        ]

    def check_rows(self, check: Callable[[Row], object]) -> None:
        """Runs ``check`` on the kept rows; raises one UserError with the locations of the rows that fail."""
        map_rows(self._rows, check, self._kept)

    def check_column(self, column: str, key: str) -> None:
        """Raises a UserError about ``key`` unless ``column`` exists and has up to MAX_VALUES short values."""
        rows = [self._rows[i] for i in self._kept]
        values = {value_of(row, column) for row in rows}
        if values == {NO_VALUE}:
            raise UserError(
                f"{key}={column}: no row of {self.path} has this column; the columns are {', '.join(rows[0])}"
            )
        unfit = next((row[column] for row in rows if not is_short(row.get(column, ""))), None)
        if unfit is not None:
            raise UserError(
                f"{key}={column}: has {show(unfit)} in {self.path}; choose a column of numbers or short texts"
            )
        if len(values) > MAX_VALUES:
            raise UserError(
                f"{key}={column}: has {len(values)} values in {self.path}; choose a column with at most "
                f"{MAX_VALUES}"
            )

    def row(self, i: int) -> tuple[Sequence[int], int, Row]:
        """Returns the ids, the limit of response tokens and the metadata of a prompt."""
        return self._ids[i], self._limits[i], self._metadata(i)

    def batch(self, indices: Sequence[int]) -> Prompts:
        """Returns the prompts at ``indices``, left-padded to the longest of them."""
        return collate_prompts([self.row(i) for i in indices], self.pad_id)


def is_short(value: object) -> bool:
    """Returns whether a value is None, a number, or a text of at most SHORT characters."""
    return value is None or (isinstance(value, str | int | float) and len(str(value)) <= SHORT)


def value_of(row: Row, column: str) -> str:
    return NO_VALUE if row.get(column) in (None, "") else str(row[column])


def collate_prompts(rows: Sequence[tuple[Sequence[int], int, Row]], pad_id: int) -> Prompts:
    """Collates (ids, limit, metadata) of the rows into one left-padded batch."""
    sequences, limits, metadata = zip(*rows, strict=True)
    ids, mask = pad_rows(sequences, pad_id, "left")
    return Prompts(ids, mask, torch.tensor(limits), metadata)


class Source(StreamSource[Prompts], Protocol):
    """A set of prompts, or a mixture of several."""

    @property
    def fingerprints(self) -> list[Fingerprint]: ...
    @property
    def longest(self) -> int: ...
    def examples(self) -> list[tuple[str, Row]]: ...
    def check_rows(self, check: Callable[[Row], object]) -> None: ...


class PromptStream(Stream[Source, Prompts]):
    """Yields the prompts of successive steps; each rank gets a contiguous slice of a step.

    A step has ``prompts_per_step`` x ``samples_per_prompt`` rows, in the order p1, p1, p2, p2. In rank order,
    the slices form the batch of a single-rank run, except that each slice is padded separately. If
    ``difficulty`` is given, it draws the prompts of each step; otherwise, steps pass over the source.
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
        difficulty: Difficulty | None = None,
    ):
        rows = prompts_per_step * samples_per_prompt
        super().__init__(
            source, batch_size=prompts_per_step, key="rollout.prompts_per_step", seed=seed, shuffle=shuffle
        )
        if rows % world_size:
            raise UserError(
                f"rollout.prompts_per_step={prompts_per_step} x "
                f"rollout.samples_per_prompt={samples_per_prompt} = {rows} rows cannot be split evenly over "
                f"{world_size} ranks"
            )
        self._samples, self.difficulty = samples_per_prompt, difficulty
        self._slice = slice(rank * rows // world_size, (rank + 1) * rows // world_size)

    def indices(self, step: int) -> list[int]:
        """Returns the indices of this rank's prompts, each repeated for its samples."""
        drawn = super().indices(step) if self.difficulty is None else self.difficulty.draw(self._batch_size)
        return [i for i in drawn for _ in range(self._samples)][self._slice]


def prompt_id(text: str) -> str:
    """Returns an id computed from a prompt's text, which identifies its responses in all steps."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]


def eval_batches(
    source: Source, *, rank: int, world_size: int, rows_per_batch: int, max_prompts: int | None = None
) -> list[tuple[Prompts, Tensor]]:
    """Divides the first ``max_prompts`` prompts among the ranks; returns the batches of this rank.

    A batch is (at most ``rows_per_batch`` prompts, their weights [b] float32). Generation is collective
    under ZeRO-3, so all ranks get batches of equal sizes, filled with copies of the last prompt of weight 0.
    """
    n = len(source) if max_prompts is None else min(max_prompts, len(source))
    per_rank = -(-n // world_size)
    batches = []
    for start in range(0, per_rank, rows_per_batch):
        indices = [rank * per_rank + i for i in range(start, min(start + rows_per_batch, per_rank))]
        weights = torch.tensor([float(i < n) for i in indices])
        batches.append((source.batch([min(i, n - 1) for i in indices]), weights))
    return batches
