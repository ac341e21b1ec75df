"""Builds multi-turn generation with the environment of `rollout.environment`."""

from __future__ import annotations

from collections.abc import Callable

from ppo_ds.assemble.data import Inputs
from ppo_ds.config.schema import PPOConfig
from ppo_ds.distributed.world import World
from ppo_ds.environments.base import is_asynchronous, load_environment
from ppo_ds.environments.calls import CallPool, try_environment
from ppo_ds.environments.multi_turn import MultiTurnGenerator
from ppo_ds.environments.tools import equip
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rollout.base import Generator


def with_environment(
    config: PPOConfig, world: World, tokenizer: Tokenizer, backend: Generator, check: Callable[[], None]
) -> Generator:
    """Wraps a decode backend so that the environment, if any, answers the turns of the policy.

    ``check`` is a collective that raises Abandoned on all ranks after a stop request. With an environment,
    all ranks must call the returned generator.
    """
    settings = config.rollout.environment
    if settings.path is None:
        return backend
    make = load_environment(settings.path, settings.arguments)
    tokenizer, read_calls = equip(tokenizer, make.func, settings.path)
    return MultiTurnGenerator(
        backend=backend,
        make_environment=make,
        independent=is_asynchronous(make.func),
        read_calls=read_calls,
        max_turns=settings.max_turns,
        max_prompt_tokens=config.data.max_prompt_tokens,
        pool=CallPool(settings.workers, settings.timeout_seconds),
        tokenizer=tokenizer,
        world=world,
        check=check,
    )


def try_on_data(config: PPOConfig, inputs: Inputs) -> None:
    """Checks the environment's tools, and tries the environment on the rows of ``inputs.examples()``.

    With rollout.environment.trial=false, only the tools are checked.
    """
    settings = config.rollout.environment
    if settings.path is None:
        return
    equip(inputs.tokenizer, load_environment(settings.path, settings.arguments).func, settings.path)
    for _, row in inputs.examples() if settings.trial else ():
        try_environment(settings, row, inputs.tokenizer, config.data.max_prompt_tokens)
