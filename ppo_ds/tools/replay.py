"""A dumped optimizer step made once more: on one rank, a row at a time, on the CPU, whatever the run was on. Nothing of the run itself is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ppo_ds.build.algorithm import learner, uses_critic
from ppo_ds.build.data import build_tokenizer
from ppo_ds.build.roles import Needs, build_actor, build_critic, critic_start
from ppo_ds.config.renamed import with_current_names
from ppo_ds.config.schema import Config, from_tree, inherit
from ppo_ds.distributed.world import connect
from ppo_ds.engine.checkpoint.state import load_model
from ppo_ds.errors import UserError
from ppo_ds.ppo.failure_dump import Dump, read_dump
from ppo_ds.ppo.nan_debug import Row, locate_nonfinite
from ppo_ds.training.health import Health, first_nonfinite
from ppo_ds.training.timing import PhaseTimer


@dataclass(frozen=True)
class Replay:
    dump: Dump
    given: str | None  # what of the dumped experience itself is not finite, and in which row of the rollout
    rows: list[Row]


def replay(folder: Path, *, trust_remote_code: bool = False) -> Replay:
    """Loads the run's models with the weights of the dump; the models that the run began with must still be there."""
    dump, config = read_dump(folder), _config(folder, trust_remote_code)
    world = connect(config.run.timeout_minutes)
    timer, tokenizer = PhaseTimer(world.device), build_tokenizer(config)
    needs = Needs(tokenizer.id_bound, dump.minibatch.ids.shape[1])
    actor, critic = build_actor(config, world, needs, 1, timer), None
    if uses_critic(config) and not config.critic.share_trunk:
        critic = build_critic(config, critic_start(config, tokenizer), world, needs, 1)
    for role, model in {"actor": actor, "critic": critic}.items():
        if model is not None:
            load_model(model, folder / role)
    learn = learner(
        config,
        world=world,
        actor=actor,
        critic=critic,
        ptx_texts=None,
        ema=None,
        timer=timer,
        health=Health(1),
    )
    rows = locate_nonfinite(learn, dump.minibatch, dump.kl_coef, dump.critic_only)
    found = first_nonfinite(dump.minibatch)
    world.close()
    return Replay(
        dump, None if found is None else f"{found[0]}, row {dump.row(found[1])} of the rollout", rows
    )


def _config(folder: Path, trust_remote_code: bool) -> Config:
    """The run's, for one rank without ZeRO, offload and the user's own DeepSpeed settings."""
    try:
        tree: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{folder}: its config.yaml cannot be read: {error}") from error
    config, wrong = from_tree(with_current_names(tree))
    if wrong:
        raise UserError(*(f"{folder / 'config.yaml'}: {line}" for line in wrong.values()))
    for role in (config.actor, config.critic):
        role.zero = replace(role.zero, stage=0, offload_optimizer=False, offload_params=False)
        role.deepspeed = {}
        role.model.trust_remote_code = trust_remote_code
    return inherit(config)
