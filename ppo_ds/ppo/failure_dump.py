"""Dumps the optimizer step that ended a PPO run, for launch/replay.py, and replays its rows.

run/failure_dump.py describes the files of a dump.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from ppo_ds.commands.entry_points import command
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ppo.health import NonFiniteStep
from ppo_ds.ppo.learner import Learner
from ppo_ds.ppo.sample_rows import sample_rows
from ppo_ds.run import failure_dump
from ppo_ds.run.failure_dump import FORMAT
from ppo_ds.run.microbatches import microbatch_rows
from ppo_ds.run.nan_debug import Replayed, ReplayedRow, replay_rows
from ppo_ds.storage.reading import read_json
from ppo_ds.types import Experience

# exceptions raised for a file with wrong types or shapes
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, SafetensorError)


@dataclass(frozen=True)
class Dump:
    """The contents of update.json and update.safetensors."""

    step: int
    what: str  # name of the first non-finite tensor
    rank: int | None  # the rank on which it was found; None, like ``place``, if a replay did not find it
    place: int | None  # its row, as an index of ``rows``
    kl_coef: float
    critic_only: bool
    rows: list[dict[str, Any]]
    minibatch: Experience

    def row(self, place: int) -> int:
        """Returns the index in the rollout, as in the run's messages, of row ``place`` of the dump."""
        return self.rows[place]["row_of_the_rollout"]


def dump_failure(
    folder: Path, step: int, skipped: NonFiniteStep, learner: Learner, tokenizer: Tokenizer, config: Path
) -> str:
    """Writes a dump of the step ``skipped`` and returns a message on it. All ranks must call this.

    If the row that caused the skip is unknown, replays the rows to locate the first non-finite tensor.
    """
    if skipped.row is None:
        replayed = locate_nonfinite(learner, skipped.minibatch, skipped.kl_coef, skipped.critic_only)
    else:
        position = skipped.rows.tolist().index(skipped.row)
        replayed = [ReplayedRow(position, skipped.rank, first=skipped.what[0])]
    texts = sample_rows(skipped.minibatch, tokenizer, range(len(skipped.minibatch)))
    return failure_dump.dump_failure(
        folder,
        step,
        skipped.what,
        replayed,
        rows=[
            {"row_of_the_rollout": number, **row}
            for number, row in zip(skipped.rows.tolist(), texts, strict=True)
        ],
        place="row {row_of_the_rollout} of the rollout",
        columns=skipped.minibatch.tensors(),
        models=learner.models(),
        config=config,
        about={"kl_coef": skipped.kl_coef, "critic_only": skipped.critic_only},
        hint=f"; replay it with: {command('replay')} {folder}",
    )


def locate_nonfinite(
    learner: Learner, minibatch: Experience, kl_coef: float, critic_only: bool
) -> list[ReplayedRow]:
    """Replays every row of ``minibatch``; returns the results in row order. All ranks must call this.

    Weights, optimizers and counters do not change. Each rank replays its share of the rows, and the tokens of
    a row are not divided among ranks.
    """
    if learner.world.sequence is not None:
        alone = replace(learner.world, sequence=None)
        learner = replace(learner, context=replace(learner.context, world=alone))
    world = learner.world
    plan = microbatch_rows(minibatch, 1, world)
    totals, value_totals = learner.totals(minibatch)
    models: dict[str, Replayed] = {}
    if not critic_only:
        policy_loss = partial(learner.policy_loss, totals=totals, value_totals=value_totals, kl_coef=kl_coef)
        models["actor"] = learner.actor, policy_loss
    if learner.critic is not None:
        value_loss = partial(learner.value_loss, critic=learner.critic, totals=value_totals)
        models["critic"] = learner.critic, value_loss
    return replay_rows(models, plan, [minibatch.select(part).trimmed() for part in plan], world)


def read_dump(folder: Path) -> Dump:
    """Reads a dump. Raises UserError unless the folder holds a complete dump of this format."""
    try:
        about = read_json(folder / "update.json")
        if about.get("format") != FORMAT:
            raise UserError(
                f"{folder}: has format {about.get('format')}, this version reads {FORMAT}: "
                "use the version that wrote it"
            )
        minibatch = Experience(**load_file(folder / "update.safetensors"))
        rows = [(type(row["prompt"]), type(row["row_of_the_rollout"])) for row in about["rows"]]
        if rows != [(str, int)] * len(minibatch) or about["place"] not in (None, *range(len(rows))):
            raise ValueError("the rows of update.json are not those of update.safetensors")
        names = {f.name for f in fields(Dump)} - {"minibatch"}
        return Dump(**{name: about[name] for name in names}, minibatch=minibatch)
    except DAMAGE as error:
        raise UserError(f"{folder}: is no complete dump: {error}; give run.dir/dumps/step_NNNNNN") from error
