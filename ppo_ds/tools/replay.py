"""Replays a dumped optimizer step of PPO on one CPU rank, row by row, without changing files of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_ds.assemble.algorithm import learner
from ppo_ds.assemble.data import build_tokenizer
from ppo_ds.assemble.roles import build_actor, build_critic, critic_start, ppo_needs
from ppo_ds.config.schema import PPOConfig, has_critic
from ppo_ds.config.types import replace
from ppo_ds.distributed.world import connect
from ppo_ds.engine.checkpoint.state import load_model
from ppo_ds.errors import UserError
from ppo_ds.ppo.failure_dump import Dump, locate_nonfinite, read_dump
from ppo_ds.ppo.health import ParityMonitor, first_nonfinite
from ppo_ds.run.health import Health
from ppo_ds.run.nan_debug import ReplayedRow
from ppo_ds.run.stage import StepContext
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.storage.reading import entries_from_elsewhere, read_yaml
from ppo_ds.tools.settings import config_of_settings

ONE_RANK: dict[str, Any] = {"stage": 0, "offload_optimizer": False, "offload_params": False}


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    dump: Dump
    given: str | None  # the first non-finite column of the dumped experience and its row, if any
    rows: list[ReplayedRow]


def replay(folder: Path, *, trust_remote_code: bool = False) -> Replay:
    """Repeats the dumped optimizer step; the run's initial models must still exist."""
    for problem in entries_from_elsewhere(folder):
        raise UserError(f"{folder}: {problem}")
    config = _read_config(folder, trust_remote_code)
    dump = read_dump(folder)
    world = connect(config.run.timeout_minutes)
    context = StepContext(world=world, timer=PhaseTimer(world.device), health=Health(1))
    tokenizer = build_tokenizer(config)
    needs = ppo_needs(tokenizer.id_bound, dump.minibatch.ids.shape[1])
    actor, critic = build_actor(config, world, needs, 1, context.timer), None
    load_model(actor, folder / "actor")
    if has_critic(config):
        critic = build_critic(config, critic_start(config, tokenizer), world, needs, 1)
        load_model(critic, folder / "critic")
    learn = learner(config, context, actor=actor, critic=critic, parity=ParityMonitor(None, stops=False))
    rows = locate_nonfinite(learn, dump.minibatch, dump.kl_coef, dump.critic_only)
    found = first_nonfinite(dump.minibatch)
    world.close()
    given = None if found is None else f"{found[0]}, row {dump.row(found[1])} of the rollout"
    return Replay(dump, given, rows)


def _read_config(folder: Path, trust_remote_code: bool) -> PPOConfig:
    """Returns the run's config, adapted to one rank: without ZeRO, offloading and DeepSpeed settings.

    The chat template is left out, because the dump contains token ids.
    """
    file = folder / "config.yaml"
    try:
        tree = read_yaml(file)
    except OSError as error:
        raise UserError(f"{folder}: its config.yaml cannot be read: {error}") from error
    config = config_of_settings(
        tree, file, trust_remote_code=trust_remote_code, with_template=False, kind=PPOConfig
    )
    return replace(
        config,
        actor=replace(config.actor, zero=replace(config.actor.zero, **ONE_RANK), deepspeed={}),
        critic=replace(config.critic, zero=replace(config.critic.zero, **ONE_RANK), deepspeed={}),
    )
