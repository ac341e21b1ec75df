"""Tokenized texts and demonstrations for language-modelling losses: SFT, and the PTX loss of PPO."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppo_ds.config.sections.data import DataConfig
from ppo_ds.config.types import replace
from ppo_ds.data.learned_spans import Learn, learned_spans
from ppo_ds.data.messages import (
    Prompt,
    PromptFormat,
    add_system_message,
    check_text,
    column_names,
    parse_chat,
    parse_prompt,
    prompt_format,
    refuse_tools,
    remove_final_answer,
)
from ppo_ds.data.order import Order, Passes
from ppo_ds.data.prompts import collate_prompts
from ppo_ds.data.rows import load_rows, parse_rows
from ppo_ds.data.sharing import encode_rows
from ppo_ds.data.token_rows import Piece, TokenRows, encode_texts, num_characters
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.ops.sequences import pad_rows
from ppo_ds.types import Prompts, Row, Sequences

if TYPE_CHECKING:
    from ppo_ds.distributed.world import World

# Columns of the answer to "prompt"; the first existing column is used.
ANSWER_COLUMNS = ("response", "answer", "completion", "chosen")
CHAT_COLUMNS = ("messages", "conversations", "chosen")  # columns of chats that include the answer

Demonstration = tuple[Prompt | None, str]  # prompt and answer; without a prompt, all text is learned


def parse_demonstration(row: Row, format: PromptFormat, learn: Learn = "answer") -> Demonstration:
    """Returns the row's prompt and answer. Errors omit the row's location, which the caller adds.

    With ``learn`` "assistant", messages after the last assistant message are dropped.
    """
    column = format.column or "prompt"
    if row.get("text") is not None:
        return None, _check_answer(row["text"], "text")
    refuse_tools(row)
    name = next((each for each in ANSWER_COLUMNS if row.get(each) is not None), None)
    if row.get(column) is not None and name is not None:
        if not isinstance(row[name], list):
            return parse_prompt(row, format), _check_answer(row[name], name)
        chat = parse_chat(row[name], name)
        if len(chat) == 1 and chat[0]["role"] == "assistant":
            return parse_prompt(row, format), _check_answer(chat[0]["content"], name)
        # In preference data, the answer's column is a chat that repeats the prompt.
        return _split_chat(chat, name, format, learn)
    columns = (*CHAT_COLUMNS, column)
    name = next((each for each in columns if isinstance(row.get(each), list)), None)
    if name is None:
        raise UserError(
            f'nothing to learn: needs a column "text", or "{column}" and one of '
            f"{', '.join(ANSWER_COLUMNS)}, or a chat that ends with the assistant "
            f"({', '.join(CHAT_COLUMNS)}); the row has: {column_names(row)}"
        )
    return _split_chat(parse_chat(row[name], name), name, format, learn)


def _split_chat(chat: list[Message], name: str, format: PromptFormat, learn: Learn) -> Demonstration:
    """Splits a chat into prompt and answer; raises UserError unless it ends with an assistant message.

    With ``learn`` "assistant", messages after the last assistant message are dropped before this check.
    """
    answers = [i for i, message in enumerate(chat, start=1) if message["role"] == "assistant"]
    if learn == "assistant" and answers:
        chat = chat[: answers[-1]]
    if not chat or chat[-1]["role"] != "assistant":
        raise UserError(f'column "{name}": nothing to learn: the last message must be the assistant\'s')
    remove_final_answer(chat, name)  # raises UserError if there is no message to answer
    return add_system_message(chat[:-1], format), _check_answer(chat[-1]["content"], name)


def _check_answer(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f'column "{name}" must be a text, not {type(value).__name__}')
    return check_text(value, f'column "{name}"')


class DemonstrationSource:
    """Holds the token ids of texts and demonstrations, identically on every rank.

    "Learned" tokens have a loss. In a text, these are all tokens but the first; an end token is appended. In
    a demonstration, ``learn`` selects the last answer, every assistant turn, or all tokens but the first. A
    turn includes its end token if the rendered chat has one there; the last answer gets a missing end token.
    Tokens after the last learned token are removed. Rows are truncated to ``max_tokens`` on the right, and
    dropped if no learned token remains. ``report`` has the number of rows read ("rows"), truncated, dropped,
    and kept with an unknown token ("unknown"); ``len(source)`` is the number kept.
    """

    unit = "texts"

    def __init__(
        self,
        path: str,
        *,
        data: DataConfig,
        tokenizer: Tokenizer,
        split: str = "train",
        max_samples: int | None = None,
        learn: Learn = "answer",
        max_tokens: int = 512,
        key: str = "data.ptx_path",
        max_tokens_key: str = "data.ptx_max_tokens",
        world: World | None = None,
    ):
        """Reads and encodes the data set; see PromptSource.

        Without data.prompt_column, the prompt of a row with a separate answer is in the column "prompt".
        ``key`` and ``max_tokens_key`` are the config keys of ``path`` and ``max_tokens``.
        """
        self.path, self.key, self.max_tokens_key, self.learn = path, key, max_tokens_key, learn
        self._tokenizer = tokenizer
        data = replace(data, prompt_column=data.prompt_column or "prompt")
        self._format = prompt_format(tokenizer, data, key)
        self._rows = load_rows(
            path, split=split, revision=data.revision, max_rows=max_samples, key=key, world=world
        )
        demonstrations, self.fingerprint = parse_rows(world, self._rows, self._parse, key, path)
        self._kept = array("I")  # the index of each kept row
        self._ids = TokenRows()  # token ids of the kept rows
        self._learned = TokenRows("B")  # 1 for each learned token of the kept rows
        self.has_chats = any(isinstance(prompt, list) for prompt, _ in demonstrations)
        self.report = {"rows": len(demonstrations), "truncated": 0, "dropped": 0}
        sizes = [len(answer) + num_characters(prompt or "") for prompt, answer in demonstrations]
        encoded = encode_rows(
            world, tokenizer, self._rows, sizes, lambda i: self.pieces(*demonstrations[i]), self._encode
        )
        for i, row in enumerate(encoded):
            ids, learned = row[: len(row) // 2], row[len(row) // 2 :]
            if not any(learned[:max_tokens]):
                self.report["dropped"] += 1
                continue
            self.report["truncated"] += len(ids) > max_tokens
            self._kept.append(i)
            self._ids.append(ids[:max_tokens])
            self._learned.append(learned[:max_tokens])
        self.report["unknown"] = tokenizer.count_unknown(self._ids)
        if not len(self):
            raise UserError(
                f"{key}={path}: all {len(demonstrations)} rows are dropped: their answers begin after "
                f"{max_tokens_key}={max_tokens} tokens; raise it"
            )

    def _parse(self, row: Row) -> Demonstration:
        return parse_demonstration(row, self._format, self.learn)

    def _encode(self, pieces: list[Piece], encoded: list[list[int]]) -> list[list[int]]:
        """Returns [ids, flags] of a row up to its last learned token; flags: 1 for learned tokens, else 0."""
        is_chat = not any(piece.special_tokens for piece in pieces)
        if len(pieces) > 1 and not encoded[0]:
            raise UserError("the prompt has no tokens")
        ids, learned = self.join([(t, p.learned) for t, p in zip(encoded, pieces, strict=True)], is_chat)
        return [[*ids, *learned]]

    def pieces(self, prompt: Prompt | None, answer: str) -> list[Piece]:
        """Divides a row's text into pieces that are either completely learned or not learned at all."""
        if prompt is None:
            return [Piece(answer, True, special_tokens=True)]
        if isinstance(prompt, str):
            return [Piece(prompt, self.learn == "all", special_tokens=True), Piece(answer, True)]
        chat = [*prompt, {"role": "assistant", "content": answer}]
        text, spans = learned_spans(self._tokenizer, chat, self.learn)
        pieces, end = [], 0
        for start, stop in spans:
            pieces += [Piece(text[end:start], False)] if start > end else []
            pieces.append(Piece(text[start:stop], True))
            end = stop
        return [*pieces, Piece(text[end:], False)]

    def join(self, pieces: list[tuple[list[int], bool]], chat: bool) -> tuple[list[int], list[bool]]:
        """Joins the pieces of a row into ids and learned flags; adds a missing end token of the last answer.

        In a chat, a turn is learned up to its last end token. If the template marks the turns, the whole
        marked text is learned, and so is an end token directly after it.
        """
        ids: list[int] = []
        learned: list[bool] = []
        stops, marked = self._tokenizer.stop_ids, self._tokenizer.marks_answers and self.learn != "all"
        ended = False  # whether the last learned piece has an end token
        for part, taught in pieces:
            ends = [k for k, token in enumerate(part) if token in stops]
            if taught:
                count = ends[-1] + 1 if chat and ends and not marked else len(part)
                ended = bool(ends) and (chat or ends[-1] == len(part) - 1)
            elif marked and learned[-1:] == [True] and not ended and ends[:1] == [0]:
                count, ended = 1, True
            else:
                count = 0
            ids += part
            learned += [True] * count + [False] * (len(part) - count)
        last = max((k for k, taught in enumerate(learned) if taught), default=len(ids) - 1) + 1
        ids, learned = ids[:last], learned[:last]
        if not ended:
            ids, learned = ids + list(stops[:1]), learned + [True] * len(stops[:1])
        return ids, [False, *learned[1:]]  # the first token cannot be predicted

    def __len__(self) -> int:
        return len(self._kept)

    def order(self, seed: int, shuffle: bool) -> Order:
        return Passes(len(self), seed, shuffle)

    @property
    def longest(self) -> int:
        return self._ids.longest

    @property
    def token_counts(self) -> tuple[int, int]:
        """The numbers of learned tokens and of all tokens of the kept rows."""
        return sum(sum(row) for row in self._learned), sum(len(row) for row in self._ids)

    @property
    def marked(self) -> bool:
        """True if the chat template marks the learned tokens of the chats."""
        return self.has_chats and self.learn != "all" and self._tokenizer.marks_answers

    def location(self, i: int) -> str:
        return self._rows.location(self._kept[i])

    def batch(self, indices: Sequence[int]) -> Sequences:
        """Returns the rows at ``indices``, right-padded.

        Only the first token is stored as prompt, so R = T - 1. ``response_mask`` marks the learned tokens;
        ``response_lengths`` also counts the other tokens, which the model attends to.
        """
        ids, mask = pad_rows([self._ids[i] for i in indices], self._tokenizer.pad_id)
        learned, _ = pad_rows([self._learned[i] for i in indices], 0)
        return Sequences(ids, mask, learned[:, 1:].bool())

    def prompts(self, count: int, max_new_tokens: int) -> Prompts | None:
        """Returns the prompts of the first ``count`` rows that have one, for generation; None if no row has.

        Their metadata have "prompt_text", the "messages" of a chat and the "answer" in the data.
        """
        found: list[tuple[list[int], int, Row]] = []
        for i in self._kept:
            if len(found) == count:
                break
            prompt, answer = self._parse(self._rows[i])
            if prompt is not None:
                piece = Piece.of(prompt, self._tokenizer)
                about: Row = {"answer": answer, "prompt_text": piece.text}
                about |= {"messages": prompt} if isinstance(prompt, list) else {}
                (ids,) = encode_texts(self._tokenizer, [piece])
                found.append((ids, max_new_tokens, about))
        return collate_prompts(found, self._tokenizer.pad_id) if found else None
