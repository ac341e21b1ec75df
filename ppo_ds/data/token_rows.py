"""Token ids of the rows of a data set, and their tokenization in chunks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from ppo_ds.data.messages import Prompt
from ppo_ds.models.tokenizer import Tokenizer

# Limits of one tokenizer call. It returns Python ints, which take much more memory than the array
# in which ids are stored.
CHUNK_ROWS, CHUNK_CHARACTERS = 1000, 1_000_000


class Piece(NamedTuple):
    """A part of a row's text that is tokenized separately."""

    text: str
    learned: bool = True  # whether it has a language-modelling loss
    special_tokens: bool = False  # whether the tokenizer adds special tokens, such as a BOS

    @classmethod
    def of(cls, prompt: Prompt, tokenizer: Tokenizer, to_answer: bool = True) -> Self:
        """Makes a piece of a text, or of a chat that the template renders, including its special tokens."""
        if isinstance(prompt, str):
            return cls(prompt, special_tokens=True)
        return cls(tokenizer.render_chat(prompt, to_answer))


class TokenRows:
    """Token ids of many rows of different lengths, concatenated in one array.

    ``typecode`` is the type of the array: "I" for token ids, "B" for one flag per token.
    """

    def __init__(self, typecode: str = "I") -> None:
        self.ids = array(typecode)  # of all rows
        self._starts = array("L", [0])  # where each row begins; the last entry is the end of the last row

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Self:
        """Stores sequences of token ids."""
        rows = cls()
        for ids in sequences:
            rows.append(ids)
        return rows

    @classmethod
    def from_lengths(cls, ids: array[int], lengths: Iterable[int]) -> Self:
        """Splits the concatenated ids of all rows into rows of the given ``lengths``."""
        rows = cls(ids.typecode)
        rows.ids, rows._starts = ids, array("L", accumulate(lengths, initial=0))
        return rows

    def append(self, ids: Sequence[int]) -> None:
        self.ids.extend(array(self.ids.typecode, ids))
        self._starts.append(len(self.ids))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, i: int) -> array[int]:
        return self.ids[self._starts[i] : self._starts[i + 1]]

    def __iter__(self) -> Iterator[array[int]]:
        return (self[i] for i in range(len(self)))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row."""
        return max(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row."""
        return [end - start for start, end in pairwise(self._starts)]


def num_characters(prompt: Prompt) -> int:
    """Returns the number of characters of a prompt, without the text added by a chat template."""
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


def tokenizer_chunks(sizes: Sequence[int], first: int = 0) -> Iterator[slice]:
    """Yields slices of texts to tokenize together, with at least one text each.

    ``sizes`` are the numbers of characters of the texts, and ``first`` is the index of the first text.
    """
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and (i - start == CHUNK_ROWS or total + size > CHUNK_CHARACTERS):
            yield slice(first + start, first + i)
            start, total = i, 0
        total += size
    yield slice(first + start, first + len(sizes))


def encode_texts(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[list[int]]:
    """Encodes the text of each piece, with or without the tokenizer's special tokens."""
    ids: list[list[int]] = [[]] * len(pieces)
    for special in (True, False):
        indices = [i for i, piece in enumerate(pieces) if piece.special_tokens == special]
        encoded = tokenizer.encode_many([pieces[i].text for i in indices], special_tokens=special)
        for i, text_ids in zip(indices, encoded, strict=True):
            ids[i] = text_ids
    return ids
