"""Preference pairs as token ids: a preferred and a rejected text, for the training of a reward model.

A row with K ranked answers becomes up to K (K - 1) / 2 pairs, as in InstructGPT (Ouyang et al. 2022).
InstructGPT divides the loss of a row by its number of pairs; here every pair has the same weight. The pairs
of a row stay together when rows are shuffled.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from ppo_ds.config.sections.data import DataConfig
from ppo_ds.config.text import show
from ppo_ds.config.types import replace
from ppo_ds.data.messages import (
    Prompt,
    PromptFormat,
    add_system_message,
    as_number,
    check_text,
    column_names,
    parse_chat,
    prompt_format,
    refuse_tools,
)
from ppo_ds.data.order import Passes
from ppo_ds.data.rows import load_rows, parse_rows
from ppo_ds.data.sharing import encode_rows
from ppo_ds.data.token_rows import Piece, TokenRows, num_characters
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer, join_texts
from ppo_ds.ops.sequences import pad_rows
from ppo_ds.types import PreferencePairs, Row

if TYPE_CHECKING:
    from ppo_ds.distributed.world import World

PROMPT_COLUMNS = ("prompt", "context")  # the first existing column is used
RANKED_COLUMNS = ("completions", "responses")  # columns of several answers
TIES = ("tie", "same", "equal")  # values of "preference" besides A and B
NEEDED = (
    'needs the columns "chosen" and "rejected", or "response_A", "response_B" and "preference", or '
    '"completions" with a rank each'
)
# keys of ``PreferenceSource.report``
COUNTED = ("rows", "pairs", "tied", "identical", "dropped", "unknown")

Template = Literal["text", "chat"]


class ParsedRow(NamedTuple):
    """The answers of one row, each with its prompt, as texts or as chats."""

    texts: list[Prompt]
    pairs: list[tuple[int, int]]  # indices into ``texts``: preferred, rejected
    tied: int  # pairs of answers with the same rank
    margin: float
    subset: str | None


def parse_preferences(row: Row, format: PromptFormat, joint: str) -> ParsedRow:
    """Returns the texts and pairs of a row. Errors omit the row's location, which the caller adds.

    ``joint`` is the text inserted between prompt and answer if both are texts.
    """
    refuse_tools(row, "reward model")
    answers = ranked_answers(row)
    texts = [_with_prompt(row, answer, name, format, joint) for _, answer, name in answers]
    ranks = [rank for rank, _, _ in answers]
    every = [(i, j) if ranks[i] <= ranks[j] else (j, i) for i, j in combinations(range(len(ranks)), 2)]
    pairs = [(i, j) for i, j in every if ranks[i] != ranks[j]]
    margin, subset = row.get("margin"), row.get("subset")
    return ParsedRow(
        texts,
        pairs,
        tied=len(every) - len(pairs),
        margin=0.0 if margin in (None, "") else _number(margin, 'column "margin"'),  # "": an empty CSV cell
        subset=None if subset is None else str(subset),
    )


def ranked_answers(row: Row) -> list[tuple[float, Any, str]]:
    """Returns the rank (lower is better), the value and the column of each answer in a row."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return [(0, row["chosen"], "chosen"), (1, row["rejected"], "rejected")]
    if row.get("response_A") is not None and row.get("response_B") is not None:
        value = row.get("preference")
        better = str(value).strip()
        if better not in ("A", "B") and better.lower() not in TIES:
            raise UserError(f'column "preference" must be A, B or tie, not {show(value)!r}')
        return [
            (float(better == "B"), row["response_A"], "response_A"),
            (float(better == "A"), row["response_B"], "response_B"),
        ]
    name = next((column for column in RANKED_COLUMNS if isinstance(row.get(column), list)), None)
    if name is None:
        raise UserError(f"no preference: {NEEDED}; the row has: {column_names(row)}")
    answers, ranks = row[name], row.get("ranks")
    if all(isinstance(answer, dict) and "completion" in answer for answer in answers):
        ranks, answers = [each.get("rank") for each in answers], [each["completion"] for each in answers]
    elif ranks is None:
        ranks = range(len(answers))  # from the best to the worst
    if not isinstance(ranks, Sequence) or len(ranks) != len(answers):
        raise UserError(f'column "ranks" must be a list of {len(answers)} numbers, one for each answer')
    where = f'column "{name}"'
    return [
        (_number(rank, f"{where}, rank of answer {i}"), answer, f"{name}[{i - 1}]")
        for i, (rank, answer) in enumerate(zip(ranks, answers, strict=True), start=1)
    ]


def _number(value: object, what: str) -> float:
    number = as_number(value)
    if not math.isfinite(number):
        raise UserError(f"{what} must be a number, not {show(value)!r}")
    return number


def _with_prompt(row: Row, answer: object, name: str, format: PromptFormat, joint: str) -> Prompt:
    """Returns an answer with its prompt: a text, or a chat that ends with the assistant.

    An answer that is a chat with messages before its first assistant message already includes the prompt.
    """
    if format.column is not None and format.column not in row:
        raise UserError(
            f"{format.column_key}={format.column}: no such column; the row has: {column_names(row)}"
        )
    columns = PROMPT_COLUMNS if format.column is None else (format.column,)
    prompt = next((row[column] for column in columns if row.get(column) is not None), None)
    if not isinstance(prompt, (str, list, type(None))):
        raise UserError(f"the prompt must be a text or a list of messages, not {type(prompt).__name__}")
    if isinstance(answer, str):
        if prompt is None and not format.apply_chat_template:
            return check_text(answer, f'column "{name}"')
        # an answer may be empty, since a response of a policy can be empty
        text = check_text(answer, f'column "{name}"') if answer.strip() else answer
        if isinstance(prompt, str) and not format.apply_chat_template:
            if format.system is not None:
                raise UserError(
                    "the prompt is used as a bare text, which has no place for data.system; remove it, or "
                    "set data.apply_chat_template=true"
                )
            return join_texts(check_text(prompt, "the prompt"), text, joint)
        if prompt is None:
            raise UserError('data.apply_chat_template=true needs a column "prompt"')
        return add_system_message([*_as_chat(prompt), {"role": "assistant", "content": text}], format)
    if not isinstance(answer, list):
        raise UserError(f'column "{name}" must be a text or a list of messages, not {type(answer).__name__}')
    chat = parse_chat(answer, name)
    if not chat or chat[-1]["role"] != "assistant":
        raise UserError(f'column "{name}": the last message must be the assistant\'s')
    if prompt is not None and chat[0]["role"] == "assistant":
        chat = [*_as_chat(prompt), *chat]
    return add_system_message(chat, format)


def _as_chat(prompt: str | list) -> list[Message]:
    if isinstance(prompt, list):
        return parse_chat(prompt, "prompt")
    return [{"role": "user", "content": check_text(prompt, "the prompt")}]


class PreferenceSource:
    """Holds the token ids of preference pairs, identically on every rank.

    A prompt and an answer that are texts are joined by ``joint``, unless white space separates them, and
    encoded with the tokenizer's default special tokens. Chats are rendered by the chat template.
    ``data.apply_chat_template=true`` makes a text prompt a user message; null means false, unlike in PPO.

    ``report`` has the number of rows read ("rows"), of pairs of answers with different ranks ("pairs") and
    with equal ranks ("tied", left out), of pairs with equal tokens ("identical", dropped), of pairs with a
    text of more than ``max_tokens`` tokens ("dropped"), and of texts in use that have an unknown token
    ("unknown"). ``len(source)`` is the number of pairs in use.
    """

    unit = "pairs"
    max_tokens_key = "reward_model.max_tokens"

    def __init__(
        self,
        path: str,
        *,
        data: DataConfig,
        tokenizer: Tokenizer,
        split: str = "train",
        max_samples: int | None = None,
        max_tokens: int = 1024,
        joint: str | None = None,
        key: str = "data.path",
        world: World | None = None,
    ):
        """Reads and encodes the data set; see PromptSource. ``key`` is the config key of ``path``."""
        self.path, self.key, self._tokenizer = path, key, tokenizer
        data = replace(data, apply_chat_template=bool(data.apply_chat_template))
        format = prompt_format(tokenizer, data, key)
        self._file_rows = load_rows(
            path, split=split, revision=data.revision, max_rows=max_samples, key=key, world=world
        )
        self.joint = tokenizer.joint if joint is None else joint.replace("\\n", "\n")
        parse = partial(parse_preferences, format=format, joint=self.joint)
        parsed, self.fingerprint = parse_rows(world, self._file_rows, parse, key, path)
        self.template: Template = self._check_template(parsed)
        self._ids = TokenRows()  # pair i: the preferred text at 2 i, the rejected text at 2 i + 1
        self._margins, self.subsets = array("d"), list[str | None]()
        self._group_ends = array("L")  # for each row with pairs, the index after its last pair
        counts = Counter(rows=len(parsed), tied=sum(row.tied for row in parsed))
        sizes = [sum(map(num_characters, row.texts)) for row in parsed]

        def pieces(i: int) -> list[Piece]:
            return [Piece.of(text, tokenizer, to_answer=False) for text in parsed[i].texts]

        encoded = encode_rows(world, tokenizer, self._file_rows, sizes, pieces)
        for row in parsed:
            ids = [next(encoded) for _ in row.texts]
            for chosen, rejected in row.pairs:
                counts["pairs"] += 1
                if ids[chosen] == ids[rejected]:
                    counts["identical"] += 1
                elif max(len(ids[chosen]), len(ids[rejected])) > max_tokens:
                    counts["dropped"] += 1
                else:
                    self._ids.append(ids[chosen])
                    self._ids.append(ids[rejected])
                    self._margins.append(row.margin)
                    self.subsets.append(row.subset)
            if len(self) > (self._group_ends[-1] if self._group_ends else 0):
                self._group_ends.append(len(self))
        counts["unknown"] = tokenizer.count_unknown(self._ids)
        self.report = {name: counts[name] for name in COUNTED}
        if not len(self):
            raise UserError(
                f"{key}={path}: no pair of {len(parsed)} rows is left: {counts['identical']} are identical, "
                f"{counts['tied']} tied, and {counts['dropped']} longer than "
                f"reward_model.max_tokens={max_tokens}; raise it, or give other data"
            )

    def _check_template(self, parsed: list[ParsedRow]) -> Template:
        """Returns whether the rows are texts or chats; raises UserError if there are both."""
        kinds: dict[Template, int] = {}  # kind -> its first row
        for i, row in enumerate(parsed):
            for text in row.texts:
                kinds.setdefault("text" if isinstance(text, str) else "chat", i)
        if len(kinds) > 1:
            raise UserError(
                f"{self.key}={self.path}: {self._file_rows.location(kinds['text'])} has a text, "
                f"{self._file_rows.location(kinds['chat'])} a chat; a reward model reads one kind of rows: "
                "set data.apply_chat_template=true, or write all rows in the same way"
            )
        return next(iter(kinds), "text")

    def __len__(self) -> int:
        return len(self._margins)

    @property
    def longest(self) -> int:
        return self._ids.longest

    @property
    def last_tokens(self) -> set[int]:
        return {ids[-1] for ids in self._ids}

    @property
    def tokens(self) -> set[int]:
        return {token for ids in self._ids for token in set(ids)}

    def texts(self, i: int) -> tuple[str, str]:
        """Returns the preferred and the rejected text of pair ``i`` as encoded."""
        chosen, rejected = (
            self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            for ids in (self._ids[2 * i], self._ids[2 * i + 1])
        )
        return chosen, rejected

    def batch(self, indices: Sequence[int]) -> PreferencePairs:
        """Returns the pairs at ``indices``, right-padded."""
        rows = [self._ids[2 * i + side] for i in indices for side in (0, 1)]
        ids, mask = pad_rows(rows, self._tokenizer.pad_id)
        shape = (len(indices), 2, mask.shape[1])
        margins = torch.tensor([self._margins[i] for i in indices], dtype=torch.float32)
        counted = torch.ones(len(indices), dtype=torch.bool)
        return PreferencePairs(ids.view(shape), mask.view(shape), margins, counted)

    def order(self, seed: int, shuffle: bool) -> PairOrder:
        return PairOrder(self._group_ends.tolist(), seed, shuffle)


class PairOrder:
    """Repeats passes over groups of pairs. Groups are shuffled as in ``Passes``; pairs in a group are not."""

    def __init__(self, ends: list[int], seed: int, shuffle: bool):
        """Initializes the order; ``ends`` holds, for each group, the index after its last pair."""
        self._groups = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._rows = Passes(len(ends), seed, shuffle)
        self._pass, self._order = -1, list[int]()

    def __getitem__(self, position: int) -> int:
        number, i = divmod(position, self._groups[-1].stop)
        if number != self._pass:
            first = number * len(self._groups)
            rows = [self._rows[first + k] for k in range(len(self._groups))]
            self._pass, self._order = number, [pair for row in rows for pair in self._groups[row]]
        return self._order[i]


def padding_token(tokenizer: Tokenizer, sources: Sequence[PreferenceSource]) -> int:
    """Returns a padding token that is not the last token of any text.

    transformers reads a decoder's score at the last token that is not the pad token, which is the wrong
    position if the text ends with the pad token. If no special token is free, uses any token of the
    vocabulary that is in no text.
    """
    ends = {token for source in sources for token in source.last_tokens}
    special = [tokenizer.pad_id, *tokenizer.hf.all_special_ids]
    found = next((token for token in special if token not in ends), None)
    if found is not None:
        return found
    used = {token for source in sources for token in source.tokens}
    return max(set(tokenizer.hf.get_vocab().values()) - used)
