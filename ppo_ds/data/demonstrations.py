"""Tokenized texts and demonstrations for a language-modelling loss, such as InstructGPT's PTX loss in PPO."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from ppo_ds.data.messages import (
    Prompt,
    PromptFormat,
    add_system_message,
    check_text,
    column_names,
    parse_chat,
    parse_prompt,
    prompt_format,
    remove_final_answer,
)
from ppo_ds.data.order import Passes
from ppo_ds.data.rows import load_rows, map_rows
from ppo_ds.data.token_rows import TokenRows, encode_texts, num_characters, tokenizer_chunks
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.types import Row, Sequences

# Columns of the answer to "prompt"; the first one that a row has is used.
ANSWER_COLUMNS = ("response", "answer", "completion", "chosen")
CHAT_COLUMNS = ("messages", "conversations", "chosen")  # columns of chats that include the answer
_REQUIRED = (
    f'needs a column "text", or "prompt" and one of {", ".join(ANSWER_COLUMNS)}, or a chat that ends with '
    f"the assistant ({', '.join(CHAT_COLUMNS)})"
)

Demonstration = tuple[Prompt | None, str]  # prompt and answer; if prompt is None, the whole text is learned


def parse_demonstration(row: Row, format: PromptFormat) -> Demonstration:
    """Returns the row's prompt and answer; errors do not name the row's location, which the caller adds."""
    if row.get("text") is not None:
        return None, _check_answer(row["text"], "text")
    name = next((column for column in ANSWER_COLUMNS if row.get(column) is not None), None)
    if row.get("prompt") is not None and name is not None:
        if not isinstance(row[name], list):
            return parse_prompt(row, format), _check_answer(row[name], name)
        chat = parse_chat(row[name], name)
        if len(chat) == 1 and chat[0]["role"] == "assistant":
            return parse_prompt(row, format), _check_answer(chat[0]["content"], name)
        return _split_chat(chat, name, format)  # preference data repeat the prompt in the answer's column
    name = next((column for column in CHAT_COLUMNS if isinstance(row.get(column), list)), None)
    if name is None:
        raise UserError(f"nothing to learn: {_REQUIRED}; the row has: {column_names(row)}")
    return _split_chat(parse_chat(row[name], name), name, format)


def _split_chat(chat: list[Message], name: str, format: PromptFormat) -> Demonstration:
    """Splits a chat into the messages before its last one and the assistant's last message."""
    if not chat or chat[-1]["role"] != "assistant":
        raise UserError(f'column "{name}": nothing to learn: the last message must be the assistant\'s')
    remove_final_answer(chat, name)  # checks that there is a message to answer
    return add_system_message(chat[:-1], format), _check_answer(chat[-1]["content"], name)


def _check_answer(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f'column "{name}" must be a text, not {type(value).__name__}')
    return check_text(value, f'column "{name}"')


class DemonstrationSource:
    """Holds the token ids of texts and demonstrations, encoded once and identically on every rank.

    For a text, the loss covers every token but the first, and an appended end token. For a demonstration, it
    covers only the answer and its end token. The prompt of a demonstration is encoded as for generation; the
    answer is what the chat template writes after the prompt, up to the end token. Rows are truncated to
    ``max_tokens`` on the right, and dropped if nothing of the answer remains.

    ``report`` counts the rows that were read ("rows"), truncated on the right ("truncated") and dropped
    ("dropped"). ``len(source)`` is the number of rows that were not dropped.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer: Tokenizer,
        split: str = "train",
        apply_chat_template: bool | None = None,
        system: str | None = None,
        max_tokens: int = 512,
        key: str = "data.ptx_path",
        max_tokens_key: str = "data.ptx_max_tokens",
    ):
        """Reads and encodes the data set.

        For ``apply_chat_template`` and ``system`` see PromptSource. ``key`` and ``max_tokens_key`` are the
        config keys of ``path`` and ``max_tokens``, for error messages.
        """
        self.path, self.key = path, key
        self._tokenizer = tokenizer
        self._rows = load_rows(path, split=split, key=key)
        format = prompt_format(tokenizer, "prompt", apply_chat_template, system, key)
        demonstrations = map_rows(self._rows, lambda row: parse_demonstration(row, format))
        self._ids = TokenRows()  # token ids of the kept rows
        self._prompt_lengths = array("I")  # tokens at the start of each kept row that have no loss
        self.report = {"rows": len(demonstrations), "truncated": 0, "dropped": 0}
        for prompt_length, ids in self._tokenize(demonstrations):
            if prompt_length >= min(len(ids), max_tokens):
                self.report["dropped"] += 1
                continue
            self.report["truncated"] += len(ids) > max_tokens
            self._ids.append(ids[:max_tokens])
            self._prompt_lengths.append(prompt_length)
        if not len(self):
            raise UserError(
                f"{key}={path}: all {len(demonstrations)} rows are dropped: their answers begin after "
                f"{max_tokens_key}={max_tokens} tokens; raise it"
            )

    def _tokenize(self, demonstrations: Sequence[Demonstration]) -> Iterator[tuple[int, list[int]]]:
        """Yields each row's number of prompt tokens and its ids, which end with one stop token.

        The first token of a bare text counts as prompt, because nothing precedes it.
        """
        sizes = [len(answer) + num_characters(prompt or "") for prompt, answer in demonstrations]
        for part in tokenizer_chunks(sizes):
            chunk = demonstrations[part]
            texts = [self._render(*each, row) for row, each in enumerate(chunk, start=part.start)]
            heads = encode_texts(
                self._tokenizer, [head for head, _ in texts], [isinstance(prompt, str) for prompt, _ in chunk]
            )
            tails = encode_texts(
                self._tokenizer, [tail for _, tail in texts], [prompt is None for prompt, _ in chunk]
            )
            stops = self._tokenizer.stop_ids
            for i, ((prompt, _), head, tail) in enumerate(zip(chunk, heads, tails, strict=True)):
                if prompt is not None and not head:
                    raise UserError(f"{self._rows.location(part.start + i)}: the prompt has no tokens")
                ends = [k for k, token in enumerate(tail) if token in stops]
                # a chat template may write more text after its own end token
                if ends and (isinstance(prompt, list) or ends[-1] == len(tail) - 1):
                    tail = tail[: ends[-1] + 1]
                else:
                    tail = tail + list(stops[:1])
                yield max(len(head), 1), head + tail

    def _render(self, prompt: Prompt | None, answer: str, row: int) -> tuple[str, str]:
        """Returns the text of the prompt and the text to which the loss applies."""
        if prompt is None or isinstance(prompt, str):
            return prompt or "", answer
        try:
            head = self._tokenizer.render_chat(prompt)
            chat = [*prompt, {"role": "assistant", "content": answer}]
            whole = self._tokenizer.render_chat(chat, to_answer=False)
            if not whole.startswith(head):
                raise UserError(
                    "the chat template renders the prompt differently once it is answered, so the answer "
                    "cannot be separated from it; set data.chat_template"
                )
        except UserError as error:
            raise UserError(f"{self._rows.location(row)}: {error}") from error
        return head, whole[len(head) :]

    def __len__(self) -> int:
        return len(self._prompt_lengths)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row."""
        return self._ids.longest

    def batch(self, indices: Sequence[int]) -> Sequences:
        """Returns the rows at ``indices``, right-padded.

        Only the first token is stored as prompt, so R = T - 1. ``response_mask`` marks the tokens that have a
        loss; ``response_lengths`` also counts the other tokens of a demonstration's prompt, to which the
        model attends.
        """
        rows = [self._ids[i] for i in indices]
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        prompt_lengths = torch.tensor([self._prompt_lengths[i] for i in indices])[:, None]
        positions = torch.arange(int(lengths.max()))
        mask = positions < lengths
        ids = torch.full(mask.shape, self._tokenizer.pad_id)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        return Sequences(ids, mask, (mask & (positions >= prompt_lengths))[:, 1:])


class DemonstrationStream:
    """Yields batches of ``batch_size`` rows indefinitely.

    Every rank gets the whole batch; ``microbatches`` divides it among the ranks. ``key`` is the config key of
    ``batch_size`` for error messages. Each pass over the source is shuffled with the seed ``seed`` + number
    of the pass. Rows that do not fill a batch at the end of a pass begin the next batch.
    """

    def __init__(
        self,
        source: DemonstrationSource,
        *,
        batch_size: int,
        seed: int = 0,
        key: str = "algo.ptx.batch_size",
    ):
        if len(source) < batch_size:
            raise UserError(
                f"{source.key}={source.path}: {len(source)} texts are fewer than one optimizer step takes "
                f"({key}={batch_size}); set {key} to at most {len(source)}, or add texts"
            )
        self.source, self._batch_size = source, batch_size
        self._order = Passes(len(source), seed)
        self._step = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Sequences:
        first = self._step * self._batch_size
        self._step += 1
        return self.source.batch([self._order[i] for i in range(first, first + self._batch_size)])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
