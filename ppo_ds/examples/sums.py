"""The task of the quickstart: a language model learns to add, "12+34=" -> "46".

The pipelines ``quickstart`` and ``learned_reward`` (conf/pipeline/) start from the files of
``prepare_stages``. +experiment=quickstart, a single PPO run, starts from the files of ``prepare``. No stage
trains on the held-out problems.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.models.linear import install_linears
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ops.sequences import pad_rows
from ppo_ds.storage.drafts import draft_directory, write_file
from ppo_ds.types import Row

CHARACTERS = "0123456789+="
DONE = "prepared.json"  # written last, so that its presence marks a complete folder
IGNORED = -100  # label of positions without loss (cross_entropy's default)
_log = logging.getLogger(__name__)


def reward(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """Returns 1 for the correct answer and 0 for any other text."""
    return [float(response.strip() == row["answer"]) for response, row in zip(responses, rows, strict=True)]


def prepare(
    dir: str,
    seed: int,
    max_operand: int = 49,
    heldout: int = 400,
    validation: int = 400,
    hidden_size: int = 96,
    layers: int = 2,
    heads: int = 4,
    target_accuracy: float = 0.47,
    learning_rate: float = 1e-3,
    batch_size: int = 256,
    max_steps: int = 600,
) -> None:
    """Writes ``dir/model`` (Hugging Face folder), ``dir/train.jsonl`` and ``dir/heldout.jsonl``.

    A complete folder with the same arguments is kept. The problems are all sums of two numbers
    0..``max_operand`` in a seeded order. The first ``heldout`` problems are never trained on. The warm start
    does not train on the next ``validation`` problems either. It ends when the greedy accuracy on these
    reaches ``target_accuracy``, and fails after ``max_steps`` batches of ``batch_size`` problems.
    """
    arguments = {name: value for name, value in locals().items() if name != "dir"}
    folder = Path(dir)
    if is_complete(folder, arguments):
        return
    _check(**arguments)
    begin(folder)
    rows = problems(max_operand, seed)
    heldout_rows, validation_rows = rows[:heldout], rows[heldout : heldout + validation]
    demonstrations = rows[heldout + validation :]
    write_jsonl(folder / "heldout.jsonl", heldout_rows)
    write_jsonl(folder / "train.jsonl", validation_rows + demonstrations)

    tokenizer = tiny.character_tokenizer(CHARACTERS)
    write_warm_started(
        folder, arguments, tokenizer, encode(demonstrations, tokenizer), encode(validation_rows, tokenizer)
    )


def prepare_stages(
    dir: str,
    seed: int,
    min_operand: int = 10,
    max_operand: int = 49,
    heldout: int = 400,
    pairs: int = 24000,
    heldout_pairs: int = 1000,
    wrong_labels: float = 0.1,
    hidden_size: int = 96,
    layers: int = 2,
    heads: int = 4,
) -> None:
    """Writes an untrained model and the data of SFT, reward model and PPO to ``dir``.

    A complete folder with the same arguments is kept. The problems are all sums of two numbers
    ``min_operand``..``max_operand`` in a seeded order. The first ``heldout`` problems are never trained on.
    Files:

    - model: a Llama with random weights.
    - train.jsonl, heldout.jsonl: rows of ``prompt`` and ``answer``, for SFT and PPO.
    - pairs.jsonl, heldout_pairs.jsonl: preference pairs on the same problems, with exactly the share
      ``wrong_labels`` of wrong labels. ``subset`` is right_label or wrong_label.
    """
    arguments = {name: value for name, value in locals().items() if name != "dir"}
    folder = Path(dir)
    if is_complete(folder, arguments):
        return
    if not 0 <= wrong_labels < 0.5:
        raise UserError(f"prepare.wrong_labels={wrong_labels}: must be at least 0 and below 0.5")
    _check(**{name: value for name, value in arguments.items() if name != "wrong_labels"})
    begin(folder)
    rows = problems(max_operand, seed, min_operand)
    parts = {"heldout": (rows[:heldout], heldout_pairs), "train": (rows[heldout:], pairs)}
    for offset, (name, (part, count)) in enumerate(parts.items()):
        write_jsonl(folder / f"{name}.jsonl", part)
        prefix = "" if name == "train" else f"{name}_"
        pairs_of_part = preference_pairs(part, count, wrong_labels, seed=2 * seed + offset)
        write_jsonl(folder / f"{prefix}pairs.jsonl", pairs_of_part)
    tokenizer = tiny.character_tokenizer(CHARACTERS)
    with torch.random.fork_rng(devices=[]):
        write_model(folder, new_model(arguments, tokenizer), tokenizer)
    finish(folder, {"arguments": arguments})


def preference_pairs(rows: list[Row], count: int, wrong_labels: float, seed: int) -> list[Row]:
    """Makes ``count`` pairs of a correct and a wrong answer.

    The problems are used in turn. In round(``count`` x ``wrong_labels``) pairs, ``chosen`` is the wrong
    answer, and ``subset`` is wrong_label.
    """
    generator = random.Random(seed)
    flipped = set(generator.sample(range(count), round(count * wrong_labels)))
    pairs = []
    for i in range(count):
        row = rows[i % len(rows)]
        answers = [row["answer"], wrong_answer(row["answer"], generator)]
        chosen, rejected = reversed(answers) if i in flipped else answers
        subset = "wrong_label" if i in flipped else "right_label"
        pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected, "subset": subset})
    return pairs


def wrong_answer(answer: str, generator: random.Random) -> str:
    """Draws a wrong answer: mostly a number near the sum, sometimes any number or a malformed text."""
    while True:
        kind, number = generator.random(), int(answer)
        if kind < 0.45:
            text = str(max(0, number + generator.choice((-3, -2, -1, 1, 2, 3))))
        elif kind < 0.8:
            text = str(max(0, number + generator.choice((-20, -11, -10, -9, 9, 10, 11, 20))))
        elif kind < 0.95:
            text = str(generator.randrange(100))
        elif kind < 0.975:
            text = answer[:-1]
        else:
            text = answer + generator.choice(CHARACTERS)
        if text != answer:
            return text


def is_complete(folder: Path, arguments: dict[str, Any]) -> bool:
    """Returns whether the folder was completely written with these arguments."""
    done = folder / DONE
    return done.exists() and json.loads(done.read_text())["arguments"] == arguments


def begin(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DONE).unlink(missing_ok=True)


def finish(folder: Path, about: dict[str, Any]) -> None:
    write_file(folder / DONE, json.dumps(about, indent=2) + "\n")


def _check(seed: int, min_operand: int = 0, **above_0: Any) -> None:
    """Raises UserError if the arguments do not define a valid task and model."""
    wrong = [f"prepare.{name}={value}: must be above 0" for name, value in above_0.items() if not 0 < value]
    if wrong:
        raise UserError(*wrong)
    largest, heads = above_0["max_operand"], above_0["heads"]
    sums = (largest - min_operand + 1) ** 2
    if not 0 <= min_operand <= largest:
        raise UserError(f"prepare.min_operand={min_operand}: must be from 0 to max_operand={largest}")
    if above_0["heldout"] + above_0.get("validation", 0) >= sums:
        raise UserError(f"prepare.max_operand={largest}: all {sums} sums are held out; raise it")
    if above_0["hidden_size"] % (2 * heads):
        raise UserError(
            f"prepare.hidden_size={above_0['hidden_size']}: must be a multiple of {2 * heads}, twice "
            f"prepare.heads={heads}"
        )


def problems(max_operand: int, seed: int, min_operand: int = 0) -> list[Row]:
    """Returns every sum of two numbers min_operand..max_operand once, in a seeded order."""
    numbers = range(min_operand, max_operand + 1)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return [rows[i] for i in order.tolist()]


def new_model(arguments: dict[str, Any], tokenizer: Tokenizer) -> nn.Module:
    """Returns a Llama with the sizes in the arguments of ``prepare``. Seeds torch's global random state."""
    torch.manual_seed(arguments["seed"])
    sizes = {name: arguments[name] for name in ("hidden_size", "layers", "heads")}
    return tiny.tiny_llama(tokenizer, **sizes, max_tokens=64)


def write_model(folder: Path, model: nn.Module, tokenizer: Tokenizer) -> None:
    with draft_directory(folder / "model") as draft:
        tiny.save(model, tokenizer, draft)


def write_warm_started(
    folder: Path,
    arguments: dict[str, Any],
    tokenizer: Tokenizer,
    demonstrations: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
) -> None:
    """Trains a new model by ``warm_start``, writes it to ``folder`` and marks the folder as complete."""
    names = ("target_accuracy", "learning_rate", "batch_size", "max_steps")
    with one_thread(), torch.random.fork_rng(devices=[]):
        model = new_model(arguments, tokenizer)
        install_linears(model)
        settings = {name: arguments[name] for name in names}
        steps, accuracy = warm_start(model, demonstrations, validation, **settings)
    _log.info("the warm start took %d steps; validation accuracy %.0f %%", steps, 100 * accuracy)
    write_model(folder, model, tokenizer)
    finish(folder, {"arguments": arguments, "steps": steps, "validation_accuracy": accuracy})


def encode(rows: list[Row], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Returns ids and labels [N,T] of prompts and answers; only the answers have labels."""
    return encode_turns([[(row["prompt"], False), (row["answer"], True)] for row in rows], tokenizer)


def encode_turns(rows: list[list[tuple[str, bool]]], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Encodes texts as ids and labels [N,T], right-padded.

    A row is a list of (text, whether the policy writes it). Only the policy's texts, and the end token after
    each of them, have labels.
    """
    parts = iter(tokenizer.encode_many([text for row in rows for text, _ in row], special_tokens=False))
    sequences = []
    for row in rows:
        ids: list[int] = []
        labels: list[int] = []
        for _, is_turn in row:
            part = next(parts) + [tokenizer.stop_ids[0]] * is_turn
            ids += part
            labels += part if is_turn else [IGNORED] * len(part)
        sequences.append((ids, labels))
    ids_of_rows, labels_of_rows = zip(*sequences, strict=True)
    return pad_rows(ids_of_rows, tokenizer.pad_id)[0], pad_rows(labels_of_rows, IGNORED)[0]


def warm_start(
    model: nn.Module,
    demonstrations: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    *,
    target_accuracy: float,
    learning_rate: float,
    batch_size: int,
    max_steps: int,
    evaluate_every: int = 5,
) -> tuple[int, float]:
    """Trains until the accuracy on ``validation`` reaches the target; returns steps and accuracy.

    Raises UserError if the target is not reached in ``max_steps``.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
    ids, labels = demonstrations
    accuracy = 0.0
    for step, index in enumerate(_batches(len(ids), batch_size, max_steps), start=1):
        logits = model(input_ids=ids[index]).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[index][:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % evaluate_every == 0:
            accuracy = greedy_accuracy(model, *validation)
            if accuracy >= target_accuracy:
                return step, accuracy
    raise UserError(
        f"prepare.target_accuracy={target_accuracy}: not reached in {max_steps} steps ({accuracy:.2f} at "
        "the end); lower it or raise prepare.max_steps"
    )


@torch.no_grad()
def greedy_accuracy(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    """Returns the share of rows [N,T] whose greedy answer equals the labels, using one forward."""
    greedy = model(input_ids=ids).logits[:, :-1].argmax(-1)
    expected = labels[:, 1:]
    return ((greedy == expected) | (expected == IGNORED)).all(1).float().mean().item()


def _batches(rows: int, batch_size: int, count: int) -> Iterator[Tensor]:
    """Yields ``count`` batches of row indices; the last rows of a pass are skipped if they fill no batch."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(count):
        if len(order) < min(batch_size, rows):
            order = torch.randperm(rows)
        yield order[:batch_size]
        order = order[batch_size:]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, because float sums, and thus the model, depend on the number of threads.

    A model this small is not faster with more threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def write_jsonl(file: Path, rows: list[Row]) -> None:
    write_file(file, "".join(json.dumps(row) + "\n" for row in rows))
