"""Continuous batching: responses are decoded together, each in a slot of the cache.

A prompt is prefilled once for all of its responses. When a response ends, the next response in the queue gets
its slot; once the queue is empty, the batch shrinks. The slots in use are always the first ones, so that a
forward can omit all other slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, nn

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.heartbeat import beat, counting
from ppo_ds.rollout.base import Continuation, DecodeBackend, SamplingParams, StopStrings, max_new_tokens
from ppo_ds.rollout.cache import Prefix
from ppo_ds.rollout.decoding import Decoder
from ppo_ds.rollout.graphs import Graphs
from ppo_ds.rollout.slots import Slots
from ppo_ds.types import Prompts, to_device

# The number of cache columns in use is rounded up to a multiple of COLUMNS, since kernels are faster on whole
# vectors.
COLUMNS = 8
# With CUDA graphs, the number of columns grows in steps of about a quarter, since each shape is recorded: a
# row of 8,192 tokens has 16 shapes. The numbers are multiples of GRAPH_COLUMNS. From FIRST_GRAPH_COLUMNS on,
# attention reads at most 40 % more columns than are in use (448 for 321); from 449 on, at most a third more.
FIRST_GRAPH_COLUMNS = 256
GRAPH_COLUMNS = 64
# Maximum number of tokens that are prefilled together (a longer prompt is prefilled on its own). This is
# enough to keep a GPU busy. A larger number would need more memory, since keys and values of these prompts
# are briefly in memory twice.
PREFILL_TOKENS = 8192


class _Vote(IntEnum):
    """Vote of a rank on the next forward; the largest of the ranks' votes decides."""

    NONE = 0
    CONTINUE = 1
    STOP = 2


@dataclass
class _PromptGroup:
    """A prompt, and the rows with this prompt whose responses have not yet been started or continued."""

    ids: Tensor  # [P] long, unpadded, with the tokens that the responses already have
    begun: int  # the number of these tokens
    rows: deque[int]


@dataclass
class _Response:
    """A response in progress."""

    row: int
    start: int  # position of its prompt's last token
    end: int  # start + the limit of the row
    position: int  # position of its next token; can exceed ``end`` until the next check


def group_prompts(prompts: Prompts, begun: Sequence[Sequence[int]], in_order: bool) -> list[_PromptGroup]:
    """Groups rows with equal prompts and equal ``begun`` tokens; keeps their order if ``in_order``.

    Otherwise the longest come first, so that prompts that are prefilled together have similar lengths.
    """
    groups: dict[tuple[int, ...], _PromptGroup] = {}
    for row, (ids, mask, tokens) in enumerate(zip(prompts.ids, prompts.mask, begun, strict=True)):
        whole = [*ids[mask].tolist(), *tokens]
        group = _PromptGroup(torch.tensor(whole), len(tokens), deque())
        groups.setdefault((len(tokens), *whole), group).rows.append(row)
    return sorted(groups.values(), key=lambda group: 0 if in_order else -len(group.ids))


def fast_batch_size(n: int) -> int:
    """Returns the number of rows to compute for n rows in use: 16 for 7 to 15, else n.

    MKL reads float32 weights once per three rows of a product; with 16 or more rows, once for all rows.
    """
    return 16 if 6 < n < 16 else n


class ContinuousBatch:
    """Decodes responses together, each in a slot of the cache."""

    def __init__(
        self,
        backend: DecodeBackend,
        lm: nn.Module,
        prompts: Prompts,
        sampling: SamplingParams,
        uniforms: Tensor,
        continuation: Continuation | None = None,
        *,
        check_every: int | None,
        graphs: Graphs,
    ):
        self.limits = max_new_tokens(prompts, sampling)
        longest = int((prompts.mask.sum(1) + self.limits).max())
        self.total = max(1, min(backend.token_budget // longest, fast_batch_size(len(prompts))))
        self.decoder = Decoder(lm, slots=self.total, length=_rounded(longest, COLUMNS))
        self.device = self.decoder.device
        self.slots = Slots(self.total, self.limits, uniforms, sampling)
        self.live: list[_Response] = []  # the responses being decoded, in slots 0 to len(live) - 1
        begun = [()] * len(prompts) if continuation is None else continuation.begun
        # generation can end while rows still wait for a slot, so the waiting rows must be the last ones
        waits = continuation is not None and len(prompts) > self.total
        self.queue = deque(group_prompts(prompts, begun, in_order=waits))
        self.not_started = len(prompts)
        # keys and values of the first prompt in the queue if some of its responses have already started
        self.kept_prefix: Prefix | None = None
        self.prefill_tokens = min(backend.token_budget, PREFILL_TOKENS)

        on_gpu = self.device.type == "cuda"
        self.lockstep = backend.lockstep_max is not None
        self.max_over_ranks = backend.lockstep_max or int
        self.should_stop = backend.should_stop
        self.graphs = graphs
        self.check_every = check_every or (16 if on_gpu else 1)
        # the number of padding tokens that cost about as much as reading the weights in another forward
        self.padding = 512 if on_gpu else 64
        self.stops = StopStrings(sampling.stop_strings, backend.tokenizer) if sampling.stop_strings else None

        self.continuation = continuation
        self.ended: set[int] = set()  # rows
        self.enough = False  # the responses in progress are interrupted
        if continuation is not None:
            self.enough = continuation.enough(self.ended)
            for row, tokens in enumerate(begun):
                self.slots.responses[row, : len(tokens)] = self.tensor(tokens)

    def decode_all(self) -> None:
        """Decodes all responses.

        In lockstep, ranks vote before each prefill and each round of decode steps; ranks without work run
        dummy forwards.
        """
        count = len(self.limits)
        with counting(count, "responses") as done:
            while True:
                while (vote := self.vote(self.wants_prompts())) is _Vote.CONTINUE:
                    self.prefill()
                more = bool(self.live) and not self.enough
                if vote is _Vote.STOP or self.vote(more) is not _Vote.CONTINUE:
                    return
                fault("generate.step")
                beat()
                self.advance()
                self.compact()
                done(count - self.not_started - len(self.live))

    def vote(self, more: bool) -> _Vote:
        """Returns STOP if any rank has to stop, else CONTINUE if any rank has ``more`` work, else NONE.

        One collective exchanges stop requests and ``more``, since each collective costs time.
        """
        own = _Vote.CONTINUE if more else _Vote.NONE
        return _Vote(self.max_over_ranks(_Vote.STOP if self.should_stop() else own))

    def lengths(self) -> Tensor:
        """Returns ``lengths`` [B] for truncate_at_stop: the tokens so far, or an ended response's limit."""
        lengths = self.limits.clone()
        for group in self.queue:
            lengths[list(group.rows)] = group.begun
        for response in self.live:
            lengths[response.row] = response.position - response.start
        return lengths

    # -- prompts ----------------------------------------------------------------------------------------

    def wants_prompts(self) -> bool:
        """Returns whether prompts are left, enough slots are free, and generation is not interrupted.

        Enough is an eighth of the slots, because a prefill for each freed slot costs more than it gains.
        """
        enough = min(self.not_started, max(1, self.total // 8))
        return self.not_started > 0 and self.total - len(self.live) >= enough and not self.enough

    def prefill(self) -> None:
        """Starts responses in free slots with at most one forward, or exactly one forward in lockstep."""
        if self.kept_prefix is not None:
            self.start(self.kept_prefix, [self.queue[0]])
        chunk = self.next_prompts() if self.wants_prompts() else []
        if chunk or self.lockstep:
            # The last token of a prompt is not prefilled, since it is the input of the first decode step. A
            # prompt of one token is prefilled anyway.
            ids = [group.ids[: max(1, len(group.ids) - 1)] for group in chunk]
            ids = ids or [torch.zeros(1, dtype=torch.long)]
            prefix = self.decoder.prefill(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True))
            self.start(prefix, chunk)

    def next_prompts(self) -> list[_PromptGroup]:
        """Returns as many of the next prompts in the queue as the free slots and ``prefill_tokens`` allow.

        The list ends earlier if the padding of the next prompt would cost more than another forward.
        """
        chunk: list[_PromptGroup] = []
        free, width, tokens = self.total - len(self.live), len(self.queue[0].ids), 0
        for group in self.queue:
            padded, tokens = width * (len(chunk) + 1), tokens + len(group.ids)
            if free <= 0 or (chunk and (padded > self.prefill_tokens or padded - tokens > self.padding)):
                break
            chunk.append(group)
            free -= len(group.rows)
        return chunk

    def start(self, prefix: Prefix, groups: Sequence[_PromptGroup]) -> None:
        """Starts responses to ``groups``, the first prompts of the queue, in the free slots.

        ``prefix`` holds the prompts' keys and values. Rows that get no slot stay at the front of the queue.
        """
        new: list[_Response] = []
        sources: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        first = len(self.live)
        if groups:
            self.kept_prefix = None
        for source, group in enumerate(groups):
            n = min(len(group.rows), self.total - first - len(new))
            position = len(group.ids) - 1
            start = position - group.begun
            for row in (group.rows.popleft() for _ in range(n)):
                new.append(_Response(row, start, start + int(self.limits[row]), position))
            sources += [source] * n
            tokens += [int(group.ids[-1])] * n
            counts += [group.begun] * n
            if group.rows:
                own = slice(source, source + 1)
                self.kept_prefix = [(keys[own].clone(), values[own].clone()) for keys, values in prefix]
            else:
                self.queue.popleft()
        if new:
            slots = self.tensor(range(first, first + len(new)))
            self.decoder.cache.fill(prefix, self.tensor(sources), slots)
            rows, positions = [r.row for r in new], [r.position for r in new]
            self.slots.put(slots, *map(self.tensor, (rows, tokens, positions, counts)))
        self.live += new
        self.not_started -= len(new)

    # -- tokens -----------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Runs decode steps until the next check; without lockstep, at most as many as the responses need."""
        left = max((response.end - response.position for response in self.live), default=0)
        steps = self.check_every if self.lockstep else min(self.check_every, left)
        assert steps > 0, "a response continues beyond its limit"
        n = self.forward_width(max(1, len(self.live)))
        used = max((response.position for response in self.live), default=0) + steps
        columns = graph_columns(used) if self.graphs.recorder else _rounded(used, COLUMNS)
        self.columns = min(columns, self.decoder.cache.length)
        step = partial(self.slots.step, n, partial(self.decoder.logits, columns=self.columns))
        for _ in range(steps):
            self.graphs.run((n, self.columns), step)
        for response in self.live:
            response.position += steps

    def forward_width(self, live: int) -> int:
        """Returns the number of slots in a forward: the ``live`` slots or a few more.

        With CUDA graphs, it is all slots or a half, a quarter, ... of them, to limit the number of shapes.
        """
        if self.graphs.recorder is None:
            return min(fast_batch_size(live), self.total)
        width = self.total
        while width // 2 >= live:
            width //= 2
        return width

    def compact(self) -> None:
        """Removes the responses that have ended and moves the last live responses to the freed slots."""
        alive = self.slots.alive[: len(self.live)].tolist()
        if self.stops is not None:
            ended = self.stopped_by_string(self.stops, alive)
            self.slots.end(self.tensor(ended))
            for slot in ended:
                alive[slot] = False
        n = sum(alive)
        if self.continuation is not None and n < len(alive):
            self.ended |= {one.row for one, is_alive in zip(self.live, alive, strict=True) if not is_alive}
            self.enough = self.continuation.enough(self.ended)
        sources = [slot for slot in range(n, len(alive)) if alive[slot]]
        targets = [slot for slot in range(n) if not alive[slot]]
        if sources:
            self.slots.move(self.tensor(sources), self.tensor(targets))
            self.decoder.cache.move(self.tensor(sources), self.tensor(targets), self.columns)
        for source, target in zip(sources, targets, strict=True):
            self.live[target] = self.live[source]
        del self.live[n:]

    def tensor(self, numbers: Sequence[int]) -> Tensor:
        """Copies the numbers to a long tensor on the device, without waiting for the device."""
        return to_device(torch.tensor(list(numbers), dtype=torch.long), self.device)

    def stopped_by_string(self, stops: StopStrings, alive: Sequence[bool]) -> list[int]:
        """Returns the slots marked in ``alive`` whose response contains a stop string.

        This copies the last tokens of these responses to the host once.
        """
        slots = [slot for slot, is_alive in enumerate(alive) if is_alive]
        if not slots:
            return []
        counts = torch.tensor([self.live[slot].position - self.live[slot].start for slot in slots])
        # the string may have been completed up to ``check_every`` steps ago
        back = torch.arange(stops.window + self.check_every, 0, -1)
        columns = to_device((counts[:, None] - back).clamp(min=0), self.device)
        rows = self.tensor([self.live[slot].row for slot in slots])
        tails = self.slots.responses[rows[:, None], columns].tolist()
        responses = zip(slots, tails, counts.tolist(), strict=True)
        return [slot for slot, tail, count in responses if stops.found_in(tail[-count:])]


def graph_columns(used: int) -> int:
    """Returns the smallest of 256, 320, 448, 576, 768, 960, 1216, ... that is at least ``used``."""
    columns = FIRST_GRAPH_COLUMNS
    while columns < used:
        columns = _rounded(columns * 5 // 4, GRAPH_COLUMNS)
    return columns


def _rounded(columns: int, step: int) -> int:
    return -(-columns // step) * step
