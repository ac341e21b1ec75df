"""Divides the tokenization of a data set among the ranks, and checks that all ranks read the same data.

Every rank reads all rows, because a reward may need any row, but tokenizes only a share and receives the
other token ids from the other ranks. All ranks must call each function; ``world=None`` is a single process.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, TypeVar

import torch

from ppo_ds.data.token_rows import Piece, TokenRows, encode_texts, tokenizer_chunks
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ppo_ds.data.rows import Rows
    from ppo_ds.distributed.world import World

T = TypeVar("T")
# Number of token ids, over all ranks, that one collective exchanges; each takes 4 bytes.
EXCHANGED_IDS = 2**24


def on_all(world: World | None, action: Callable[[], T]) -> T:
    """Runs ``action`` on every rank. If it raises UserError on one rank, every rank raises it."""
    return action() if world is None or world.size == 1 else world.on_all(action)


def refuse_different(world: World | None, value: object, source: str) -> None:
    """Raises UserError unless ``value`` is equal on all ranks; ``source`` is the data's KEY=PATH."""
    if world is None or world.size == 1:
        return
    values = world.gather_objects(value)
    other = next((rank for rank, found in enumerate(values) if found != values[0]), None)
    if other is not None:
        raise UserError(
            f"{source}: ranks 0 and {other} read different data from it; give every node the same files, or "
            "use a file system that all nodes share"
        )


def encode_rows(
    world: World | None,
    tokenizer: Tokenizer,
    rows: Rows,
    sizes: Sequence[int],
    pieces: Callable[[int], Sequence[Piece]],
    join: Callable[[list[Piece], list[list[int]]], list[list[int]]] | None = None,
) -> Iterator[Sequence[int]]:
    """Yields the token ids of the pieces of all rows; each rank tokenizes a share of the rows.

    ``sizes`` are the numbers of characters of the rows. ``join`` makes one or more sequences from the token
    ids of a row's pieces; without it, each piece is a sequence that must not be empty. UserErrors of
    ``pieces`` and ``join`` get the location of the row.
    """

    def tokenize(part: slice) -> Iterator[list[int]]:
        texts: list[list[Piece]] = []
        for i in range(part.start, part.stop):
            with rows.named_in_errors(i):
                texts.append(list(pieces(i)))
        encoded = iter(encode_texts(tokenizer, [piece for row in texts for piece in row]))
        for i, row in enumerate(texts, start=part.start):
            ids = [next(encoded) for _ in row]
            with rows.named_in_errors(i):
                if join is None and not all(ids):
                    raise UserError("a text has no tokens")
                sequences = ids if join is None else join(row, ids)
            yield from sequences

    def encode(share: slice) -> Iterator[list[int]]:
        return chain.from_iterable(map(tokenize, tokenizer_chunks(sizes[share], share.start)))

    if world is None or world.size == 1:
        yield from encode(slice(0, len(sizes)))
        return
    share = shares(sizes, world.size)[world.rank]
    own = world.on_all(lambda: TokenRows.of(encode(share)))
    yield from TokenRows.from_lengths(
        all_gather_array(world, own.ids), all_gather_array(world, array("I", own.lengths))
    )


def shares(sizes: Sequence[int], count: int) -> list[slice]:
    """Divides rows into ``count`` slices with about equal numbers of characters; slices may be empty."""
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    cuts = [0, *(bisect_right(ends, total * k / count) for k in range(1, count)), len(ends)]
    return [slice(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]


def all_gather_array(world: World, values: array[int]) -> array[int]:
    """Concatenates the arrays (typecode I) of all ranks, in rank order."""
    counts = world.gather_objects(len(values))
    parts = [array("I") for _ in counts]
    own = torch.frombuffer(values, dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32)
    width = min(max(counts), max(1, EXCHANGED_IDS // world.size))
    for start in range(0, max(counts), max(1, width)):
        block = torch.zeros(width, dtype=torch.int32)
        mine = own[start : start + width]
        block[: len(mine)] = mine
        blocks = world.concat(block).cpu().view(world.size, width)
        for part, count, ids in zip(parts, counts, blocks, strict=True):
            part.frombytes(ids[: max(0, count - start)].numpy().tobytes())
    return array("I", b"".join(parts))
