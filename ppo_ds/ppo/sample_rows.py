"""Sample rows of a step: responses as text, with statistics per response and per token.

Every rank holds all rows of an Experience, but only the metadata of its prompts, so the columns from the
metadata are gathered from all ranks (``prompt_notes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ppo_ds.data.prompts import is_short, prompt_id, value_of
from ppo_ds.distributed.world import World
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ppo.experience_metrics import reference_log_ratio
from ppo_ds.types import Experience, Rollout, Row

DIGITS = 4  # decimals of per-token numbers
# columns of a row with the prompt, or added by data/prompts.py
PROMPT_COLUMNS = ("prompt", "messages", "conversations", "prompt_text", "data_source")
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not yet a character


def sample_rows(
    experience: Experience, tokenizer: Tokenizer, chosen: Sequence[int], token_limit: int = 0
) -> list[dict[str, Any]]:
    """Returns the rows ``chosen`` as text, with token columns for the first ``token_limit`` tokens."""
    log_ratio, width = reference_log_ratio(experience), experience.prompt_width
    kl = [None] * len(experience) if log_ratio is None else log_ratio.sum(1).tolist()
    rows = []
    for i in chosen:
        prompt = experience.ids[i, :width][experience.attention_mask[i, :width]].tolist()
        response = experience.response_ids[i, : experience.response_lengths[i]].tolist()
        notes = {} if experience.notes is None else experience.notes[i]
        last = tokenizer.decode(response[-1:], skip_special_tokens=False)
        tokens = {"tokens": token_columns(experience, tokenizer, i, token_limit)} if token_limit else {}
        rows.append(
            {
                "prompt": tokenizer.decode(prompt, skip_special_tokens=False),
                **response_columns(experience, i, float(experience.scores[i]), notes, tokenizer),
                "kl": kl[i],
                "ended_by": last if experience.finished[i] else None,
                **tokens,
            }
        )
    return rows


def response_columns(
    rows: Experience | Rollout, i: int, score: float, notes: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns the columns of row ``i`` that describe its response; ``notes`` is an entry of Experience.notes.

    In an episode, "turns" alternates between texts of the policy and of the environment.
    """
    ids = rows.response_ids[i, : rows.response_lengths[i]].tolist()
    finish = "stop" if rows.finished[i] else "length"
    found = {"response": tokenizer.decode(ids), "score": score, "length": len(ids), "finish": finish, **notes}
    if rows.feedback_mask is not None:
        by = groupby(range(len(ids)), rows.feedback_mask[i].tolist().__getitem__)
        found["turns"] = [
            {"by": "environment" if feedback else "policy", "text": tokenizer.decode([ids[t] for t in turn])}
            for feedback, turn in by
        ]
    return found


def token_columns(experience: Experience, tokenizer: Tokenizer, i: int, limit: int) -> dict[str, list[Any]]:
    """Returns the columns of per-token numbers for the first ``limit`` response tokens of row ``i``.

    The reward of the state after the last token is added to the last token.
    """
    length = int(experience.response_lengths[i])
    count = min(length, limit)
    ids = experience.response_ids[i, :count].tolist()
    rewards = experience.rewards[i].clone()
    if length:
        rewards[length - 1] += rewards[length]
    columns = {name: column[i] for name, column in experience.tensors().items()} | {"rewards": rewards}
    found: dict[str, list[Any]] = {"text": token_texts(ids, tokenizer), "ids": ids}
    if "feedback_mask" in columns:
        found["feedback"] = columns["feedback_mask"][:count].tolist()
    for name in ("logprobs", "ref_logprobs", "values", "advantages", "rewards"):
        if name in columns:
            found[name] = [round(value, DIGITS) for value in columns[name][:count].tolist()]
    return found


def token_texts(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """Returns the text that each token adds; a character of several tokens is added by its last token."""
    texts, start, end = [], 0, 0  # ids[start:end] are the last tokens whose text is complete
    for i in range(1, len(ids) + 1):
        before, text = (tokenizer.decode(ids[start:stop], skip_special_tokens=False) for stop in (end, i))
        if text.endswith(INCOMPLETE) and i < len(ids):
            texts.append("")
        else:
            texts.append(text[len(before) :])
            start, end = end, i
    return texts


def prompt_notes(rollout: Rollout, limit: int, group_size: int, world: World) -> dict[int, dict[str, Any]]:
    """Chooses ``limit`` rows to log (-1: all); returns their prompt columns, by row index.

    The first response to each prompt is chosen before all second ones, and so on. All ranks must call this.
    """
    count, first = len(rollout.metadata), world.rank * len(rollout.metadata)
    spread = sorted(range(world.size * count), key=lambda i: i % group_size)
    chosen = sorted(spread if limit < 0 else spread[:limit])
    mine = {i: about_prompt(rollout.metadata[i - first]) for i in chosen if first <= i < first + count}
    return {i: note for part in world.gather_objects(mine) for i, note in part.items()}


def about_prompt(row: Row) -> dict[str, Any]:
    """Returns the prompt columns of a sample row for a row of the data.

    "asked" is the last message of a chat, or the whole prompt; "prompt_id" does not change between steps;
    "columns" holds the short values of other columns of the data, such as the answer.
    """
    columns = {
        key: value
        for key, value in row.items()
        if key not in PROMPT_COLUMNS and value is not None and is_short(value)
    }
    return {
        "asked": last_message(row),
        "prompt_id": prompt_id(row["prompt_text"]),
        **({"columns": columns} if columns else {}),
    }


def grouped(rows: Sequence[dict[str, Any]], column: str) -> dict[str, list[dict[str, Any]]]:
    """Groups rows by the value of ``column`` in their "columns"; the groups are in sorted order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(value_of(row.get("columns", {}), column), []).append(row)
    return dict(sorted(groups.items()))


def last_message(row: Row) -> str:
    """Returns the last message of a chat, without the template, or else the prompt text."""
    return row["messages"][-1]["content"] if "messages" in row else row["prompt_text"]
