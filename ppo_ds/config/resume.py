"""Decides whether a run may continue from a checkpoint although its settings have changed.

There are three kinds of settings:

- IMMUTABLE keys determine the weights, the data or the numbers stored in a checkpoint. A change is an error
  unless run.resume_allow_changes lists the key.
- MUTABLE keys do not affect the numbers of the training. They may change without a message.
- All other keys, such as run.steps, learning rates, coefficients and arguments of the reward, may change,
  and the start-up banner lists the changes.

The patterns are those of fnmatch: * matches any text, including dots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ppo_ds.config.reading import dotted_keys, with_defaults
from ppo_ds.config.schema import Config
from ppo_ds.config.text import did_you_mean, show
from ppo_ds.config.types import leaves
from ppo_ds.errors import UserError

MUTABLE = tuple(
    """
    run.name run.dir run.note run.resume run.resume_allow_changes run.dry_run run.stop_at_step run.max_minutes
    run.timeout_minutes run.threads run.matmul run.verbose run.profile rollout.environment.trial
    rollout.environment.workers memory.* checkpoint.* health.* tracker.* eval.* data.eval_* *.ema.evaluate
    sft.samples sft.sample_tokens *.model.trust_remote_code *.model.gradient_checkpointing
    *.zero.offload_* actor.zero.generation_gather rollout.vllm.kv_cache_gb rollout.vllm.sleep
    reference.zero.*
    """.split()
)
IMMUTABLE = tuple(
    """
    stage run.seed *.model.path *.model.revision *.model.dtype *.model.quantization
    actor.zero.stage critic.zero.stage scorer.zero.stage *.lora.rank *.lora.alpha *.lora.targets *.ema.decay
    critic.init critic.share_trunk
    rollout.prompts_per_step rollout.samples_per_prompt rollout.partial rollout.environment.arguments*
    rollout.environment.max_turns rollout.environment.path data.*
    prepare.* algo.action_level
    algo.old_policy algo.epochs algo.minibatch_size algo.train_on_eos algo.advantage.*
    algo.policy.loss algo.loss.agg algo.rollout_is.kind algo.rollout_is.level algo.kl.place
    algo.kl.estimator algo.kl.controller algo.kl.unit algo.value.position algo.value.next_state
    algo.reward_shaping.score_position algo.reward_shaping.normalize* algo.dynamic_sampling.enabled
    algo.ptx.batch_size sft.batch_size sft.max_tokens sft.learn reward_model.batch_size
    reward_model.max_tokens reward_model.margin reward_model.head_init reward._target_ reward.*._target_
    """.split()
)
# Sections that accept any keys.
OPEN_SECTIONS = tuple(
    """
    reward prepare actor.deepspeed critic.deepspeed scorer.deepspeed data.chat_template_kwargs
    data.task data.eval_task rollout.environment.arguments
    """.split()
)
MAX_PROBLEMS = 5  # maximum number of changed keys with separate lines
Settings = Mapping[str, Any]  # A result of schema.resolved, possibly read back from JSON or YAML.
Change = tuple[str, Any, Any]  # key, old value, new value


def check_resume(before: Settings, now: Settings, checkpoint: Path) -> list[str]:
    """Returns lines for the start-up banner that list the changed settings.

    Raises UserError if the stage has changed, or an immutable key that is not in run.resume_allow_changes. Up
    to MAX_PROBLEMS of these keys have separate lines.
    """
    if before.get("stage", "ppo") != now["stage"]:  # all other keys differ too
        raise UserError(
            f"stage={now['stage']}: {checkpoint} was made with {before.get('stage', 'ppo')}; choose another "
            "run.dir or run.name, or begin anew with run.resume=restart"
        )
    allowed = [str(name) for name in now["run"]["resume_allow_changes"]]
    refused: list[Change] = []
    permitted: list[Change] = []
    named: list[Change] = []
    for change in changes(before, now):
        key = change[0]
        is_allowed = any(key == name or key.startswith(f"{name}.") for name in allowed)
        (named if not _matches(key, IMMUTABLE) else permitted if is_allowed else refused).append(change)
    if refused:
        problems = [
            f"{key}={show(value)}: {checkpoint} was made with {show(old)}; restore that value, choose "
            "another run.dir, begin anew with run.resume=restart, or allow the change with "
            f"run.resume_allow_changes=[{','.join([*allowed, key])}]"
            for key, old, value in refused
        ]
        if len(problems) > MAX_PROBLEMS:
            more = ", ".join(key for key, *_ in refused[MAX_PROBLEMS:])
            problems[MAX_PROBLEMS:] = [f"changed too: {more}; {checkpoint} seems to be of another run"]
        raise UserError(*problems)
    lines = [f"changed    since the checkpoint: {in_words(named)}"] if named else []
    if permitted:
        lines.append(f"changed    allowed by run.resume_allow_changes: {in_words(permitted)}")
    return lines


def changes(before: Settings, now: Settings) -> list[Change]:
    """Returns (key, old value, new value) for every key that differs and is not mutable.

    If ``before`` lacks a key, because the key is newer than the checkpoint, the default counts as its old
    value. Keys of ``before`` that only variants not chosen in ``now`` have are ignored.
    """
    old, new, known = _leaves(with_defaults(Config, before, now)), _leaves(now), set(dotted_keys(Config))
    old = {key: value for key, value in old.items() if key in new or key not in known}
    return [
        (key, old.get(key), new.get(key))
        for key in dict.fromkeys([*new, *old])
        if not _matches(key, MUTABLE)
        and _relocatable(old.get(key), before) != _relocatable(new.get(key), now)
    ]


def ranks_line(before: int, now: int) -> list[str]:
    """Returns a line for the start-up banner if the number of ranks has changed since the checkpoint."""
    if before == now:
        return []
    return [
        f"changed    ranks {before} -> {now}: random numbers, such as those of sampling, differ from here on"
    ]


def unusable_start(config: Config) -> Iterator[str]:
    """Yields an error line, with the checkpoints nearby, if run.resume is not a checkpoint folder.

    Damaged checkpoints are detected later, when they are read.
    """
    if config.run.resume in ("auto", "never", "restart"):
        return
    path = Path(config.run.resume)
    nearby = path if path.is_dir() else path.parent
    root = nearby / "checkpoints" if (nearby / "checkpoints").is_dir() else nearby
    steps = {folder.name.removeprefix("step_"): folder for folder in root.glob("step_*") if folder.is_dir()}
    there = [steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)]  # the newest last
    names = ", ".join(folder.name for folder in there)
    if not path.is_dir():
        known = (
            f"{there[0].parent} has {names}"
            if there
            else "must be auto, never, restart or a path like RUN_DIR/checkpoints/step_000010"
        )
        yield f"run.resume={path}: no such checkpoint folder; {known}"
    elif there and not (path / "manifest.json").exists():
        kind = "a folder of checkpoints" if there[0].parent == path else "a run directory"
        yield f"run.resume={path}: is {kind}, not a checkpoint; it has {names}; use {there[-1]}"


def unknown_names(config: Config) -> Iterator[str]:
    """Yields an error line for each entry of run.resume_allow_changes that is neither a key nor a section."""
    known = dotted_keys(type(config))
    for name in config.run.resume_allow_changes:
        if name not in known and not name.startswith(tuple(f"{section}." for section in OPEN_SECTIONS)):
            yield f"run.resume_allow_changes={show(name)}: no such key{did_you_mean(name, known)}"


def in_words(changed: list[Change]) -> str:
    """Formats changed settings as ``key old -> new``."""
    return "; ".join(f"{key} {show(old)} -> {show(value)}" for key, old, value in changed)


def _leaves(tree: Settings) -> dict[str, Any]:
    return {".".join(path): value for path, value in leaves(tree) if value != {}}


def _relocatable(value: Any, settings: Settings) -> Any:
    """Makes a path in the run directory relative to this directory, since a run may have been moved."""
    home = f"{settings['run'].get('dir')}/"
    if isinstance(value, str) and value.startswith(home):
        return ("below run.dir", value.removeprefix(home))
    return list(value) if isinstance(value, tuple) else value


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
