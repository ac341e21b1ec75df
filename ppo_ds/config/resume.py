"""Whether a run may go on from a checkpoint though its settings have changed since.

STAYS    what the weights, the data and the numbers in the checkpoint were made with: refused, unless
run.resume_allow_changes names the key
FREE     no number of the training hangs on it: changes silently
the rest (learning rates, KL coefficients, run.steps, the reward's arguments, ...) may change, and the
start-up lines name it

Patterns are those of fnmatch: * stands for any text, dots too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from ppo_ds.config.reading import defaults, dotted_keys
from ppo_ds.config.renamed import with_current_names
from ppo_ds.config.schema import Config
from ppo_ds.config.text import did_you_mean, show
from ppo_ds.errors import UserError

MUTABLE = (
    *(
        "run.name",
        "run.dir",
        "run.resume",
        "run.resume_allow_changes",
        "run.dry_run",
        "run.stop_at_step",
        "run.max_minutes",
        "run.timeout_minutes",
    ),
    *(
        "run.threads",
        "run.verbose",
        "memory.*",
        "checkpoint.*",
        "health.*",
        "tracker.*",
        "eval.*",
        "data.eval_*",
        "actor.ema.evaluate",
    ),
    *(
        "*.model.trust_remote_code",
        "*.model.gradient_checkpointing",
        "*.zero.offload_*",
        "actor.zero.generation_gather",
        "reference.zero.*",
    ),
)
IMMUTABLE = (
    "stage",
    "run.seed",
    *(
        "*.model.path",
        "*.model.revision",
        "*.model.dtype",
        "actor.zero.stage",
        "critic.zero.stage",
        "*.lora.rank",
        "*.lora.alpha",
        "*.lora.targets",
    ),
    *(
        "actor.ema.decay",
        "critic.init",
        "critic.share_trunk",
        "rollout.prompts_per_step",
        "rollout.samples_per_prompt",
        "data.*",
        "prepare.*",
    ),
    *(
        "algo.action_level",
        "algo.old_policy",
        "algo.epochs",
        "algo.minibatch_size",
        "algo.train_on_eos",
        "algo.advantage.*",
        "algo.policy.loss",
        "algo.loss.agg",
    ),
    *(
        "algo.kl.place",
        "algo.kl.estimator",
        "algo.kl.controller",
        "algo.kl.unit",
        "algo.value.position",
        "algo.value.next_state",
    ),
    *(
        "algo.reward_shaping.score_position",
        "algo.reward_shaping.normalize*",
        "algo.dynamic_sampling.enabled",
        "algo.ptx.batch_size",
    ),
    *("reward._target_", "reward.*._target_"),
)
OPEN = (
    "reward",
    "prepare",
    "actor.deepspeed",
    "critic.deepspeed",
    "data.chat_template_kwargs",
)  # sections whose keys are not ours
RECORD = (
    "config.yaml",
    "metrics.jsonl",
    "samples",
    "summary.json",
    "curves.png",
    "model",
    "model_ema",
    "adapter",
    "critic",
    "wandb.id",
)

Settings = Mapping[str, Any]  # what config.resolved gives, as JSON or YAML gives it back
Change = tuple[str, Any, Any]  # key, before, now


def judge(before: Settings, now: Settings, checkpoint: Path) -> list[str]:
    """What has changed, as lines for the start-up; UserError where something that must stay has."""
    allowed = [str(name) for name in now["run"]["resume_allow_changes"]]
    refused, permitted, named = [], [], []
    for change in changes(before, now):
        key = change[0]
        may = any(key == name or key.startswith(f"{name}.") for name in allowed)
        (named if not _matches(key, IMMUTABLE) else permitted if may else refused).append(change)
    if refused:
        raise UserError(
            *[
                f"{key}={show(value)}: {checkpoint} was made with {show(old)}: set it back, start in "
                "another run.dir, "
                f"or go on all the same with run.resume_allow_changes=[{','.join([*allowed, key])}]"
                for key, old, value in refused
            ]
        )
    lines = [f"changed    since the checkpoint: {_told(named)}"] if named else []
    return lines + (
        [f"changed    by leave of run.resume_allow_changes: {_told(permitted)}"] if permitted else []
    )


def changes(before: Settings, now: Settings) -> list[Change]:
    """Every key that is not FREE and differs. A key that is younger than ``before`` had its default then.

    Keys that have been renamed since are compared under their current names.
    """
    before = with_current_names(before)
    old, new = _leaves(defaults(Config)) | _leaves(before), _leaves(now)
    return [
        (key, old.get(key), new.get(key))
        for key in dict.fromkeys([*new, *old])
        if not _matches(key, MUTABLE) and _placed(old.get(key), before) != _placed(new.get(key), now)
    ]


def ranks_line(before: int, now: int) -> list[str]:
    """A line for the start-up where the checkpoint was made by another number of ranks."""
    return (
        [f"changed    ranks {before} -> {now}: samples are drawn otherwise from here on"]
        if before != now
        else []
    )


def unusable_start(config: Config) -> Iterator[str]:
    """A line where run.resume names no checkpoint, with those that are near.

    Whether one is damaged is seen when it is read.
    """
    if config.run.resume in ("auto", "never"):
        return
    path = Path(config.run.resume)
    there = _checkpoints_near(path if path.is_dir() else path.parent)
    names = ", ".join(folder.name for folder in there)
    if not path.is_dir():
        known = (
            f"{there[0].parent} has {names}"
            if there
            else "must be auto, never or one like RUN_DIR/checkpoints/step_000010"
        )
        yield f"run.resume={path}: no such checkpoint folder; {known}"
    elif there and not (path / "manifest.json").exists():
        kind = "a folder of checkpoints" if there[0].parent == path else "a run directory"
        yield f"run.resume={path}: is {kind}, not a checkpoint; it has {names}: give {there[-1]}"


def _checkpoints_near(folder: Path) -> list[Path]:
    """Those of a run directory, or of a folder of checkpoints; the newest last."""
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    found = [
        path for path in root.glob("step_*") if path.is_dir() and path.name.removeprefix("step_").isdigit()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def unknown_names(config: Config) -> Iterator[str]:
    """A line for each name in run.resume_allow_changes that is no key and no section."""
    known = dotted_keys(Config)
    for name in config.run.resume_allow_changes:
        if name not in known and not name.startswith(tuple(f"{section}." for section in OPEN)):
            yield f"run.resume_allow_changes={show(name)}: no such key{did_you_mean(name, known)}"


def open_run_directory(run_dir: Path, now: Settings, start: Path | None) -> list[str]:
    """Makes it and writes config.yaml; ``start``: the checkpoint that the run goes on from.

    Returns lines for the start-up.
    """
    try:
        run_dir.mkdir(
            mode=0o700, parents=True, exist_ok=True
        )  # the owner's alone; one that is there keeps the rights it has
        elsewhere = start is not None and start.parent.resolve() != (run_dir / "checkpoints").resolve()
        lines = _keep_record(run_dir, now, elsewhere) if start is None or elsewhere else []
        draft = run_dir / ".config.yaml.tmp"
        draft.write_text(yaml.safe_dump(now, sort_keys=False, allow_unicode=True), encoding="utf-8")
        draft.replace(run_dir / "config.yaml")
    except OSError as error:
        raise UserError(f"run.dir={run_dir}: cannot be written: {error.strerror}") from error
    return lines


def _keep_record(run_dir: Path, now: Settings, elsewhere: bool) -> list[str]:
    """What a run left that this one does not go on from is moved away, whole, and a line says where.

    It stays where the settings are the same, since the same steps are made again; ``elsewhere``: from another
    start they are not the same.
    """
    metrics = run_dir / "metrics.jsonl"
    steps = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
    if not steps:
        return []
    before = _read(run_dir / "config.yaml")
    changed = changes(before, now) if before else []
    if before and not changed and not elsewhere:
        return [f"anew       {run_dir} had {steps} steps and no checkpoint: they are made again"]
    kept = next(path for i in count(1) if not (path := run_dir / f"earlier_{i}").exists())
    kept.mkdir(mode=0o700)
    for name in RECORD:
        if (run_dir / name).exists():
            (run_dir / name).rename(kept / name)
    settings = f" It was made with other settings: {_told(changed)}" if changed else ""
    return [
        f"anew       {run_dir} had {steps} steps that this run does not go on from: their record is in "
        f"{kept} now.{settings}"
    ]


def _read(file: Path) -> Settings | None:
    """A config.yaml; None where there is none that can be read."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("run"), dict) else None


def _told(found: list[Change]) -> str:
    return "; ".join(f"{key} {show(old)} -> {show(value)}" for key, old, value in found)


def _leaves(tree: Settings, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= (
            _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        )
    return found


def _placed(value: Any, settings: Settings) -> Any:
    """A path below the run directory, as seen from there: the same run may have been moved."""
    home = f"{settings['run'].get('dir')}/"
    if isinstance(value, tuple):
        return list(value)
    return (
        ("below run.dir", value.removeprefix(home))
        if isinstance(value, str) and value.startswith(home)
        else value
    )


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
