"""A multi-turn task: a language model learns to use a calculator for sums that it cannot compute itself.

The policy may call the calculator with "?12+34". The environment answers ">46=", and the policy takes another
turn. Any other turn is the answer to the problem: its reward is 1 if correct, otherwise 0.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from torch import Tensor

from ppo_ds.errors import UserError
from ppo_ds.examples.sums import IGNORED, begin, encode_turns, is_complete, write_jsonl, write_warm_started
from ppo_ds.models import tiny
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.types import Row

CHARACTERS = "0123456789+=?>"
_CALL = re.compile(r"\?(\d{1,9})\+(\d{1,9})")


class Calculator:
    """The environment. ``call_cost`` is subtracted from the reward for each call of the calculator."""

    def __init__(self, call_cost: float = 0.0):
        self.call_cost = call_cost

    def reset(self, row: Row) -> None:
        self.answer = row["answer"]

    def step(self, answer: str) -> tuple[str, float, bool]:
        if (call := _CALL.fullmatch(answer)) is not None:
            return f">{int(call[1]) + int(call[2])}=", -self.call_cost, False
        return "", float(answer == self.answer), True


def prepare(
    dir: str,
    seed: int,
    digits: int = 3,
    problems: int = 6000,
    heldout: int = 400,
    validation: int = 400,
    calls: float = 0.3,
    hidden_size: int = 96,
    layers: int = 2,
    heads: int = 4,
    target_accuracy: float = 0.6,
    learning_rate: float = 1e-3,
    batch_size: int = 256,
    max_steps: int = 1500,
) -> None:
    """Writes ``dir/model`` (Hugging Face folder), ``dir/train.jsonl`` and ``dir/heldout.jsonl``.

    A complete folder with the same arguments is kept. A problem is the sum of two numbers of ``digits``
    digits. The first ``heldout`` of the ``problems`` are never trained on, and the warm start does not train
    on the next ``validation`` problems. It trains on demonstrations of the rest, of which the share ``calls``
    uses the calculator. The warm start ends when the share ``target_accuracy`` of the validation problems
    is solved with the calculator, and fails after ``max_steps`` batches of ``batch_size`` demonstrations.
    """
    arguments = {name: value for name, value in locals().items() if name != "dir"}
    folder = Path(dir)
    if is_complete(folder, arguments):
        return
    if heldout + validation >= problems or problems > 9**2 * 100 ** (digits - 1) or not 0 < calls <= 1:
        raise UserError(
            f"prepare: problems={problems} with digits={digits}, heldout={heldout}, validation={validation} "
            f"and calls={calls:g} define no task; raise problems or digits, and set calls above 0 and up to 1"
        )
    begin(folder)
    numbers = range(10 ** (digits - 1), 10**digits)
    pairs = random.Random(seed).sample(range(len(numbers) ** 2), problems)
    operands = [(numbers[pair // len(numbers)], numbers[pair % len(numbers)]) for pair in pairs]
    rows: list[Row] = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in operands]
    write_jsonl(folder / "heldout.jsonl", rows[:heldout])
    write_jsonl(folder / "train.jsonl", rows[heldout:])
    checked, demonstrated = rows[heldout : heldout + validation], rows[heldout + validation :]
    tokenizer, random_calls = tiny.character_tokenizer(CHARACTERS), random.Random(seed)
    write_warm_started(
        folder,
        arguments,
        tokenizer,
        encode(demonstrated, tokenizer, [random_calls.random() < calls for _ in demonstrated]),
        without_choice(encode(checked, tokenizer, [True] * len(checked))),
    )


def encode(rows: list[Row], tokenizer: Tokenizer, uses_calculator: list[bool]) -> tuple[Tensor, Tensor]:
    """Returns ids and labels [N,T]; ``uses_calculator`` selects the rows that call the calculator."""
    demonstrations = []
    for row, calls in zip(rows, uses_calculator, strict=True):
        call = [(f"?{row['prompt'][:-1]}", True), (f">{row['answer']}=", False)] if calls else []
        demonstrations.append([(row["prompt"], False), *call, (row["answer"], True)])
    return encode_turns(demonstrations, tokenizer)


def without_choice(encoded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Removes each row's first label, the token that decides whether the calculator is called."""
    ids, labels = encoded
    first = (labels != IGNORED).long().argmax(1, keepdim=True)
    return ids, labels.scatter(1, first, IGNORED)
