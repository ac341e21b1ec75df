"""The decode backend of our own: a preallocated cache of slots, continuous batching, one prefill per prompt.

Answers are decoded side by side, each in a slot of the cache. A prompt is read once for all of its answers; an answer that has ended gives
its slot to the next one that waits; when none waits, the batch shrinks. Slots with an answer are always the first ones, so that a forward
takes no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.heartbeat import beat
from ppo_ds.rollout.base import SamplingParams, finish, limits_of, never
from ppo_ds.rollout.cache import Prefix
from ppo_ds.rollout.decoding import Decoder, own_masks
from ppo_ds.rollout.graphs import Graphs, Recorder, recorder_for
from ppo_ds.rollout.slots import Slots
from ppo_ds.types import Prompts, Rollout

COLUMNS = 8  # columns of the cache come into use in steps of this, since kernels like whole vectors
GRAPH_COLUMNS = 64  # the same where each shape costs a recording
PREFILL_TOKENS = (
    8192  # enough to keep a GPU busy; prompts read beside each other stand in memory twice for a moment
)


class StaticGenerator:
    """Decodes with as many slots as ``token_budget`` tokens make: slots x (longest prompt + its limit), at least one."""

    def __init__(
        self,
        lm: Callable[[], nn.Module],
        *,
        tokenizer: Any,
        token_budget: int,
        agree: Callable[[int], int] | None = None,
        look_every: int | None = None,
        stopped: Callable[[], bool] = never,
    ):
        """``lm`` gives the model to decode with: it is asked inside generation mode only.

        ``agree``: the largest of the ranks' numbers, where the ranks hold the model together and must run its forwards in step.
        ``look_every``: steps between two looks of the host at who has ended; each waits for the device. By default 1 on a CPU, where
        a look is free, and 16 on a GPU.
        ``stopped``: whether the answers are no longer wanted; see Generator. Asked at every look.
        """
        self.lm = lm
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        self.agree = agree
        self.look_every = look_every
        self.stopped = stopped
        self.graphs_work = (
            agree is None
        )  # weights that come and go have no addresses to record; nor is tried again what failed once
        self._recorder: Recorder | None = None

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        lm = self.lm()
        device, limits = next(lm.parameters()).device, limits_of(prompts, sampling)
        decode = partial(
            self.tokenizer.decode, skip_special_tokens=False
        )  # a special token's text can be a stop string too
        uniforms = torch.rand(len(prompts), int(limits.max()), dtype=torch.float64, device=device)
        responses, logprobs = torch.zeros(uniforms.shape, dtype=torch.long), torch.zeros(uniforms.shape)
        with own_masks(lm):
            for rows in self._bands(prompts.mask.sum(1) + limits):
                run = _Run(
                    lm,
                    prompts.select(rows),
                    sampling,
                    uniforms[rows.to(device), : int(limits[rows].max())],
                    token_budget=self.token_budget,
                    decode=decode,
                    agree=self.agree,
                    look_every=self.look_every,
                    stopped=self.stopped,
                    graphs=self._graphs(device),
                )
                run.decode_all()
                self.graphs_work &= run.graphs.failure is None
                width = run.slots.answers.shape[1]
                responses[rows, :width], logprobs[rows, :width] = (
                    run.slots.answers[:-1].cpu(),
                    run.slots.logprobs[:-1].cpu(),
                )
        return finish(
            prompts, responses, logprobs, sampling=sampling, pad_id=self.tokenizer.pad_id, decode=decode
        ).trimmed()

    def _graphs(self, device: torch.device) -> Graphs:
        if self._recorder is None:
            self._recorder = recorder_for(device)
        return Graphs(self._recorder if self.graphs_work else None)

    def _bands(self, totals: Tensor) -> list[Tensor]:
        """totals [B], prompt and limit -> the rows that are decoded together: all; or where they do not fit, those of a size.

        Slots are as long as the longest row of their band needs: one long prompt must not take the room of many short ones.
        """
        longest = int(totals.max())
        if self.agree is not None or self.token_budget // longest >= len(totals):
            return [torch.arange(len(totals))]
        sizes = (
            (longest / totals).log2().div(2).floor()
        )  # within a band nobody is four times as long as another
        return [(sizes == size).nonzero()[:, 0] for size in sizes.unique()]


class _Wish(IntEnum):
    """Of a rank; the largest counts."""

    NOTHING = 0
    MORE = 1
    LEAVE = 2


@dataclass
class _Waiting:
    """A prompt, and the answers to it that have not begun."""

    ids: Tensor  # [P] long, unpadded
    rows: deque[int]


@dataclass
class _Answer:
    """One that is under way."""

    row: int
    start: int  # where its prompt's last token is
    end: int  # start + its limit
    position: int  # where its next token goes; beyond ``end`` until the next look where it has ended


def waiting(prompts: Prompts) -> list[_Waiting]:
    """Rows with the same prompt make one; the longest prompts come first, so that those read together are of a length."""
    groups: dict[tuple[int, ...], _Waiting] = {}
    for row, (ids, mask) in enumerate(zip(prompts.ids, prompts.mask, strict=True)):
        prompt = ids[mask]
        groups.setdefault(tuple(prompt.tolist()), _Waiting(prompt, deque())).rows.append(row)
    return sorted(groups.values(), key=lambda group: -len(group.ids))


def whole_rows(n: int) -> int:
    """The number of rows to multiply instead of n. Up to 15, MKL reads float32 weights once for every three; from 16 on, once for all."""
    return 16 if 6 < n < 16 else n


class _Run:
    """One rollout: which answer is in which slot."""

    def __init__(
        self,
        lm: nn.Module,
        prompts: Prompts,
        sampling: SamplingParams,
        uniforms: Tensor,
        *,
        token_budget: int,
        decode: Callable[[list[int]], str],
        agree: Callable[[int], int] | None,
        look_every: int | None,
        stopped: Callable[[], bool],
        graphs: Graphs,
    ):
        self.limits = limits_of(prompts, sampling)
        longest = int((prompts.mask.sum(1) + self.limits).max())
        self.total = max(1, min(token_budget // longest, whole_rows(len(prompts))))
        self.decoder = Decoder(lm, slots=self.total, length=_rounded(longest, COLUMNS))
        self.device = self.decoder.device
        self.slots = Slots(self.total, self.limits, uniforms, sampling)
        self.live: list[_Answer] = []  # those in the first slots
        self.queue = deque(waiting(prompts))
        self.unbegun = len(prompts)
        self.kept: Prefix | None = (
            None  # of the first prompt of the queue, where some of its answers have begun
        )
        self.prefill_tokens = min(token_budget, PREFILL_TOKENS)

        on_gpu = self.device.type == "cuda"
        self.in_step = agree is not None
        self.agree = agree or int
        self.stopped = stopped
        self.graphs = graphs
        self.look_every = look_every or (16 if on_gpu else 1)
        self.padding = (
            512 if on_gpu else 64
        )  # tokens that take as long as reading the weights once more, roughly
        self.stops = (
            _StopStrings(sampling.stop_strings, decode, self.look_every) if sampling.stop_strings else None
        )

    def decode_all(self) -> None:
        """Ranks in step agree before each kind of forward; those that have nothing left run along with a dummy."""
        while True:
            while (wish := self._agreed(self._wants_prompts())) is _Wish.MORE:
                self._read_prompts()
            if wish is _Wish.LEAVE or self._agreed(bool(self.live)) is not _Wish.MORE:
                return
            fault("generate.step")
            beat()
            self._advance()
            self._look()

    def _agreed(self, more: bool) -> _Wish:
        """Whether any rank has more to do; who is to stop is heard first. One number for both, since each costs ranks in step a collective."""
        return _Wish(self.agree(_Wish.LEAVE if self.stopped() else _Wish.MORE if more else _Wish.NOTHING))

    # -- prompts --------------------------------------------------------------------------------------------------------------------------

    def _wants_prompts(self) -> bool:
        """A few at a time: a forward for each single slot that comes free would cost more than the slot is worth."""
        return self.unbegun > 0 and self.total - len(self.live) >= min(self.unbegun, max(1, self.total // 8))

    def _read_prompts(self) -> None:
        """Fill the free slots, as far as one forward goes. In step it is one forward, whatever is to be done."""
        if self.kept is not None:
            self._begin(self.kept, [self.queue[0]])
        chunk = self._next_prompts() if self._wants_prompts() else []
        if chunk or self.in_step:
            # all but the last token, which is the first step's; a prompt of one token is read for the sake of one rule for all
            read = [group.ids[: max(1, len(group.ids) - 1)] for group in chunk] or [
                torch.zeros(1, dtype=torch.long)
            ]
            prefix = self.decoder.prefill(torch.nn.utils.rnn.pad_sequence(read, batch_first=True))
            self._begin(prefix, chunk)

    def _next_prompts(self) -> list[_Waiting]:
        """The next of the queue, until free slots or the tokens of a forward are used up, or another forward costs less than their padding."""
        chunk: list[_Waiting] = []
        free, width, tokens = self.total - len(self.live), len(self.queue[0].ids), 0
        for group in self.queue:
            padded, tokens = width * (len(chunk) + 1), tokens + len(group.ids)
            if free <= 0 or (chunk and (padded > self.prefill_tokens or padded - tokens > self.padding)):
                break
            chunk.append(group)
            free -= len(group.rows)
        return chunk

    def _begin(self, prefix: Prefix, groups: Sequence[_Waiting]) -> None:
        """Answers to the first prompts of the queue, whose cache ``prefix`` is, in the free slots. What does not fit stays at the front."""
        new: list[_Answer] = []
        sources: list[int] = []
        tokens: list[int] = []
        first = len(self.live)
        if groups:
            self.kept = None
        for source, group in enumerate(groups):
            n = min(len(group.rows), self.total - first - len(new))
            start = len(group.ids) - 1
            for row in (group.rows.popleft() for _ in range(n)):
                new.append(_Answer(row, start, start + int(self.limits[row]), start))
            sources += [source] * n
            tokens += [int(group.ids[-1])] * n
            if group.rows:
                self.kept = [
                    (keys[source : source + 1].clone(), values[source : source + 1].clone())
                    for keys, values in prefix
                ]
            else:
                self.queue.popleft()
        if new:
            slots = self._tensor(range(first, first + len(new)))
            self.decoder.cache.fill(prefix, self._tensor(sources), slots)
            self.slots.put(
                slots,
                self._tensor([a.row for a in new]),
                self._tensor(tokens),
                self._tensor([a.start for a in new]),
            )
        self.live += new
        self.unbegun -= len(new)

    # -- tokens ---------------------------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Steps until the next look; none that no answer can need, unless ranks go in step."""
        left = max((a.end - a.position for a in self.live), default=0)
        steps = self.look_every if self.in_step else min(self.look_every, left)
        assert steps > 0, "an answer goes on beyond its limit"
        n = self._width(max(1, len(self.live)))
        used = max((a.position for a in self.live), default=0) + steps
        self.columns = min(
            _rounded(used, GRAPH_COLUMNS if self.graphs.recorder else COLUMNS), self.decoder.cache.length
        )
        step = partial(self.slots.step, n, partial(self.decoder.logits, columns=self.columns))
        for _ in range(steps):
            self.graphs.run((n, self.columns), step)
        for answer in self.live:
            answer.position += steps

    def _width(self, live: int) -> int:
        """The slots that a forward takes: those with an answer, or a few more; with graphs, of few shapes, all, half of them, a quarter ..."""
        if self.graphs.recorder is None:
            return min(whole_rows(live), self.total)
        width = self.total
        while width // 2 >= live:
            width //= 2
        return width

    def _look(self) -> None:
        """Who has ended? The last answers that go on take the places of those that do not."""
        alive = self.slots.alive[: len(self.live)].tolist()
        if self.stops is not None:
            ended = self.stops.ended(self.slots.answers, self.live, alive)
            self.slots.end(self._tensor(ended))
            for slot in ended:
                alive[slot] = False
        n = sum(alive)
        sources = [slot for slot in range(n, len(alive)) if alive[slot]]
        targets = [slot for slot in range(n) if not alive[slot]]
        if sources:
            self.slots.move(self._tensor(sources), self._tensor(targets))
            self.decoder.cache.move(self._tensor(sources), self._tensor(targets), self.columns)
        for source, target in zip(sources, targets, strict=True):
            self.live[target] = self.live[source]
        del self.live[n:]

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.long, device=self.device)


class _StopStrings:
    """Which answers, as text, hold a stop string."""

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str], look_every: int):
        self.stops = stops
        self.decode = decode
        # a token is a byte at least; a few more, since some tokenizers drop a space where a text begins. What is overlooked is cut later.
        self.window = max(len(stop.encode()) for stop in stops) + 4 + look_every

    def ended(self, answers: Tensor, live: Sequence[_Answer], alive: Sequence[bool]) -> list[int]:
        """answers [B+1,R] -> the slots of those that ended, among those that are alive. One copy to the host."""
        slots = [slot for slot, goes_on in enumerate(alive) if goes_on]
        if not slots:
            return []
        counts = torch.tensor([live[slot].position - live[slot].start for slot in slots])
        places = (counts[:, None] - torch.arange(self.window, 0, -1)).clamp(min=0).to(answers.device)
        tails = answers[
            torch.tensor([live[slot].row for slot in slots], device=answers.device)[:, None], places
        ].tolist()
        texts = [self.decode(tail[-count:]) for tail, count in zip(tails, counts.tolist(), strict=True)]
        return [
            slot for slot, text in zip(slots, texts, strict=True) if any(stop in text for stop in self.stops)
        ]


def _rounded(columns: int, step: int) -> int:
    return -(-columns // step) * step
