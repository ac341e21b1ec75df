"""Texts and demonstrations for a language-modelling loss beside PPO's (InstructGPT's PTX)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import torch

from ppo_ds.data.messages import (
    Prompt,
    Reading,
    asked,
    chat_of,
    names_of,
    prompt_of,
    reading_for,
    text_of,
    with_system,
)
from ppo_ds.data.order import Passes
from ppo_ds.data.prompts import chunks, encode, size_of
from ppo_ds.data.rows import load_rows, read_rows
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.types import Row, Sequences

ANSWER_COLUMNS = ("response", "answer", "completion", "chosen")  # beside "prompt"; the first that a row has
CHAT_COLUMNS = ("messages", "conversations", "chosen")  # with the answer in it
_WANTED = f'needs a column "text", or "prompt" and one of {", ".join(ANSWER_COLUMNS)}, or a chat that ends with the assistant ({", ".join(CHAT_COLUMNS)})'

Demonstration = tuple[Prompt | None, str]  # None: no prompt, the whole text is learned


def demonstration_of(row: Row, reading: Reading) -> Demonstration:
    """What a row teaches. Errors do not know the row's place: the caller adds it."""
    if row.get("text") is not None:
        return None, _answer(row["text"], "text")
    name = next((c for c in ANSWER_COLUMNS if row.get(c) is not None), None)
    if row.get("prompt") is not None and name is not None:
        return _answered(row, name, reading)
    name = next((c for c in CHAT_COLUMNS if isinstance(row.get(c), list)), None)
    if name is None:
        raise UserError(f"nothing to learn: {_WANTED}; the row has: {names_of(row)}")
    return _whole(chat_of(row[name], name), name, reading)


def _answered(row: Row, name: str, reading: Reading) -> Demonstration:
    """The answer may be a message too, or, as preference data have it, the whole chat once more."""
    if not isinstance(row[name], list):
        return prompt_of(row, reading), _answer(row[name], name)
    chat = chat_of(row[name], name)
    if len(chat) == 1 and chat[0]["role"] == "assistant":
        return prompt_of(row, reading), _answer(chat[0]["content"], name)
    return _whole(chat, name, reading)


def _whole(chat: list[Message], name: str, reading: Reading) -> Demonstration:
    if not chat or chat[-1]["role"] != "assistant":
        raise UserError(f'column "{name}": nothing to learn: the last message must be the assistant\'s')
    asked(chat, name)  # someone must have said something
    return with_system(chat[:-1], reading), _answer(chat[-1]["content"], name)


def _answer(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f'column "{name}" must be a text, not {type(value).__name__}')
    return text_of(value, f'column "{name}"')


class DemonstrationSource:
    """Token ids of a data set's texts and demonstrations, made once, on every rank alike.

    Of a text every token is learned, and an end token after the last. Of a demonstration only the answer and its end token are: the
    prompt is made into tokens as it is for generation, and what the chat template writes after it is the answer, up to its end token.
    More than ``max_tokens`` tokens are cut on the right; where nothing of the answer is left the row is dropped.

    ``report``: {"rows": read, "truncated": cut on the right, "dropped": left out}; ``len(source)`` is rows - dropped.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer: Tokenizer,
        split: str = "train",
        text_as_chat: bool | None = None,
        system: str | None = None,
        max_tokens: int = 512,
        key: str = "data.ptx_path",
    ):
        """``text_as_chat``, ``system``: as for prompts. ``key``: the path's, for errors."""
        self.path, self.key = path, key
        self._tokenizer = tokenizer
        self._rows = load_rows(path, split=split, key=key)
        reading = reading_for(tokenizer, "prompt", text_as_chat, system, key)
        demonstrations = read_rows(self._rows, lambda row: demonstration_of(row, reading))
        self._ids = array("I")  # of all kept rows, one after the other
        self._starts = array("L", [0])  # where each kept row's ids begin; last: where they end
        self._given = array("I")  # how many of its first tokens are given, not learned
        self.report = {"rows": len(demonstrations), "truncated": 0, "dropped": 0}
        for part in chunks([len(answer) + size_of(prompt or "") for prompt, answer in demonstrations]):
            for given, ids in self._encode(demonstrations[part], part.start):
                self._add(given, ids, max_tokens)
        if not len(self):
            name = key.replace("path", "max_tokens")
            raise UserError(
                f"{key}={path}: all {len(demonstrations)} rows are dropped: their answers begin after {name}={max_tokens} tokens; raise it"
            )

    def _encode(self, chunk: list[Demonstration], start: int) -> list[tuple[int, list[int]]]:
        """Each row's number of given tokens, and its ids. The first token of a bare text is given: nothing stands before it."""
        texts = [self._rendered(*each, start + i) for i, each in enumerate(chunk)]
        heads = encode(
            self._tokenizer, [head for head, _ in texts], [isinstance(prompt, str) for prompt, _ in chunk]
        )
        tails = encode(self._tokenizer, [tail for _, tail in texts], [prompt is None for prompt, _ in chunk])
        made = []
        for i, ((prompt, _), head, tail) in enumerate(zip(chunk, heads, tails, strict=True)):
            if prompt is not None and not head:
                raise UserError(f"{self._rows.place(start + i)}: the prompt has no tokens")
            made.append((max(len(head), 1), head + self._ended(tail, rendered=isinstance(prompt, list))))
        return made

    def _rendered(self, prompt: Prompt | None, answer: str, row: int) -> tuple[str, str]:
        """What is given, and what is learned."""
        if prompt is None or isinstance(prompt, str):
            return prompt or "", answer
        try:
            head = self._tokenizer.render_chat(prompt)
            whole = self._tokenizer.render_chat(
                [*prompt, {"role": "assistant", "content": answer}], to_answer=False
            )
            if not whole.startswith(head):
                raise UserError(
                    "the chat template renders the prompt otherwise once it is answered, so the answer cannot be told from it; set data.chat_template"
                )
        except UserError as error:
            raise UserError(f"{self._rows.place(row)}: {error}") from error
        return head, whole[len(head) :]

    def _ended(self, ids: list[int], rendered: bool) -> list[int]:
        """With one end token at the end; ``rendered``: what a template wrote, which may have a line break after its own."""
        stops = self._tokenizer.stop_ids
        ends = [i for i, token in enumerate(ids) if token in stops]
        if ends and (rendered or ends[-1] == len(ids) - 1):
            return ids[: ends[-1] + 1]
        return ids + list(stops[:1])

    def _add(self, given: int, ids: list[int], limit: int) -> None:
        if given >= min(len(ids), limit):
            self.report["dropped"] += 1
            return
        self.report["truncated"] += len(ids) > limit
        self._ids.extend(ids[:limit])
        self._starts.append(len(self._ids))
        self._given.append(given)

    def __len__(self) -> int:
        return len(self._given)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(end - start for start, end in pairwise(self._starts))

    def batch(self, indices: Sequence[int]) -> Sequences:
        """Rows at ``indices``, right-padded to their own longest; the first token alone is the prompt, so R = T - 1.

        ``response_mask`` has the tokens to learn; those that are given are attended to, but no actions.
        """
        rows = [self._ids[self._starts[i] : self._starts[i + 1]] for i in indices]
        lengths, given = (
            torch.tensor([len(row) for row in rows])[:, None],
            torch.tensor([self._given[i] for i in indices])[:, None],
        )
        places = torch.arange(int(lengths.max()))
        mask = places < lengths
        ids = torch.full(mask.shape, self._tokenizer.pad_id)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        return Sequences(ids, mask, (mask & (places >= given))[:, 1:])


class DemonstrationStream:
    """Endless batches of ``batch_size`` rows, all of them on every rank: who learns from which is for the learner to say.

    Every pass over the source has its own order, seeded with seed + pass; what does not fill a batch at a pass's end begins the next.
    """

    def __init__(self, source: DemonstrationSource, *, batch_size: int, seed: int = 0):
        if len(source) < batch_size:
            raise UserError(
                f"{source.key}={source.path}: {len(source)} texts are fewer than one optimizer step takes (algo.ptx.batch_size={batch_size}); "
                f"set algo.ptx.batch_size to at most {len(source)}, or add texts"
            )
        self.source, self._batch_size = source, batch_size
        self._order = Passes(len(source), seed)
        self._step = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Sequences:
        first = self._step * self._batch_size
        self._step += 1
        return self.source.batch([self._order[place] for place in range(first, first + self._batch_size)])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
