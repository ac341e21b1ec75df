"""Trains and evaluates from Python: the same path as the commands, in one process that goes on afterwards.

    from ppo_ds import train

    result = train("grpo", {"actor.model.path": "Qwen/Qwen2.5-0.5B-Instruct"}, reward=score, data=rows)
    result.metrics.plot(y="reward/score_mean")

Errors are raised: UserError, a ValueError, for mistakes in arguments, data and models, and RunError for a run
that ends with an error. docs/python.md describes the functions.
"""

from __future__ import annotations

import gc
import html
import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from launch import evaluate as evaluate_command
from launch.cli import load_config
from launch.hub import use_caches_without_the_hub
from launch.process import prepare_environment, take_lock
from ppo_ds import registered
from ppo_ds.config.checks.data import hub_names, looks_local
from ppo_ds.config.schema import OPEN_VARIANTS, PPOConfig
from ppo_ds.config.types import Variants
from ppo_ds.errors import RunError, UserError
from ppo_ds.storage.drafts import write_file
from ppo_ds.tracking.tracker import Record, Tracker

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")
Settings = Mapping[str, Any]
# a path or Hub name, prompts, rows, or an object with to_list() or to_dict("records"): a datasets.Dataset or
# a pandas.DataFrame
Data = str | Path | Iterable[Any]
REGISTRIES: dict[str, type[Variants] | None] = {**OPEN_VARIANTS, "reward.path": None}
ROWS = Path("outputs", "rows")  # where the rows of Python objects are written
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FRAME = '<iframe srcdoc="{}" style="width: 100%; height: 800px; border: 0"></iframe>'


@dataclass(frozen=True)
class Page:
    """An HTML page in a file, which a notebook shows inline."""

    path: Path

    def _repr_html_(self) -> str:
        return FRAME.format(html.escape(self.path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Training:
    """The result of ``train``; ``exit_reason`` and the held-out results are in ``summary``."""

    run_dir: Path
    summary: dict[str, Any]  # summary.json

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics of all steps, one row per step, also of the steps before a resume."""
        return read_table(self.run_dir / "metrics.jsonl").set_index("step")

    @property
    def model(self) -> Path | None:
        """The folder of the trained model, for transformers; None if the run was stopped before its end."""
        folder = self.run_dir / "model"
        return folder if folder.exists() else None

    def report(self) -> Page:
        """Returns the report of the run."""
        return Page(self.run_dir / "report.html")


@dataclass(frozen=True)
class Comparison:
    """The result of ``evaluate``."""

    out: Path
    summary: dict[str, Any]  # evaluation.json, see docs/evaluation.md

    @property
    def rows(self) -> pandas.DataFrame:
        """One row per response to a prompt, with every model's response and scores."""
        return read_table(self.out / "evaluation.jsonl")

    def report(self) -> Page:
        """Returns the page with the models' responses side by side."""
        return Page(self.out / "evaluation.html")


class OnStep(Tracker):
    """Calls a function after each step; its exceptions end the run."""

    def __init__(self, call: Callable[[int, Record], object]):
        self._call = call

    def log(self, step: int, metrics: Record) -> None:
        self._call(step, metrics)


def train(
    experiment: str,
    settings: Settings | None = None,
    *,
    reward: Callable[..., Any] | str | None = None,
    data: Data | None = None,
    eval_data: Data | None = None,
    on_step: Callable[[int, Record], object] | None = None,
) -> Training:
    """Trains as ``python launch/train.py +experiment=EXPERIMENT KEY=VALUE ...`` does, in this process.

    Ctrl-C ends the run after the step in progress, with a checkpoint; the same call continues it.

    Args:
        experiment: An option of conf/experiment, such as grpo, rlhf, sft or quickstart.
        settings: Config keys and groups with their values, such as {"run.steps": 20, "algo": "rloo"}.
        reward: A function (prompts, responses, rows) -> scores, or its path, as in reward.path.
        data: The training data, as data.path or as rows: see ``Data``. Rows are written to outputs/rows.
        eval_data: The held-out data, in the same forms.
        on_step: Called as (step, metrics) after each step. An exception ends the run and is raised.
    """
    given = {**(settings or {}), **named(reward, data=data, eval_data=eval_data)}
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: train() runs in one process; start several ranks with "
            "deepspeed launch/train.py"
        )
    config = load_config([f"+experiment={experiment}", *overrides(given)])
    if config.run.dry_run:
        raise UserError("run.dry_run=true: needs a process of its own; start it with launch/train.py")
    run_dir = Path(config.run.dir or "")
    lock = take_lock(run_dir)
    assert lock is not None  # on rank 0
    try:
        own_pool = isinstance(config, PPOConfig) and config.rollout.own_weights
        prepare_environment(config.run.verbose, trains=True, fixed_segments=own_pool)
        use_caches_without_the_hub(hub_names(config))
        from ppo_ds.assemble.run import build_run  # imports deepspeed
        from ppo_ds.run.state import EXIT_CODES

        trackers = [OnStep(on_step)] if on_step else []
        with signals_restored():
            run = build_run(config, mark_ending=lock.mark_ending, trackers=trackers)
            try:
                reason = run.fit()
            except BaseException as error:
                run.fail(error)
                raise
        if EXIT_CODES[reason] == 1:
            raise RunError(run.error or reason)
    finally:
        lock.release()
        gc.collect()  # frees the models
    return Training(run_dir, json.loads((run_dir / "summary.json").read_text()))


def evaluate(
    *models: str | Path,
    settings: Settings | None = None,
    reward: Callable[..., Any] | str | None = None,
    data: Data | None = None,
    samples: int | None = None,
    out: str | Path = "outputs/evaluation",
) -> Comparison:
    """Compares models as ``python launch/evaluate.py MODEL ... KEY=VALUE ...`` does, in this process.

    Args:
        models: Run directories, model folders, adapters or Hub names; all are compared with the first one.
        settings, reward, data: As for ``train``.
        samples: Sampled responses to each prompt, for pass@k; None: one greedy response.
        out: The folder of the results.
    """
    given = {**(settings or {}), **named(reward, data=data)}
    options = [f"--out={out}", *([f"--samples={samples}"] if samples is not None else [])]
    wanted = evaluate_command.parse([*options, *map(str, models), *overrides(given)])
    evaluate_command.create_folder(wanted.out)
    prepare_environment(wanted.config.run.verbose, trains=True)
    paths = [model.path for model in wanted.models if not looks_local(model.path)]
    use_caches_without_the_hub([*paths, *hub_names(wanted.config)])
    evaluate_command.run_evaluation(wanted)
    return Comparison(wanted.out, json.loads((wanted.out / evaluate_command.RESULT).read_text()))


def register(key: str, name: str | None = None) -> Callable[[T], T]:
    """Returns a decorator that makes a function or class a value of ``key`` in this process.

    The value is ``name``, by default the object's own name, or ``ppo_ds.registered:NAME`` for reward.path.
    A config names code in a module without registration: algo.policy.loss=package.module.name.

    Args:
        key: algo.policy.loss, a function (PolicyTerms, section) -> TokenLoss or a class derived from
            PolicyConfig; algo.advantage.estimator, a function (Responses, CreditOptions) -> Estimate or a
            class derived from AdvantageConfig; rollout.backend, a class that implements
            ppo_ds.rollout.base.Generator or one derived from RolloutConfig; reward.path, a function.
    """
    if key not in REGISTRIES:
        raise UserError(f"register({key!r}): must be one of {', '.join(REGISTRIES)}")
    section = REGISTRIES[key]

    def add(target: T) -> T:
        called = str(name or getattr(target, "__name__", ""))
        if not called.isidentifier():
            raise UserError(f"register({key!r}): {called!r} is not a name; give one as the second argument")
        setattr(registered, called, target)
        if section is not None:
            section.add(called, target, f"{registered.__name__}.{called}")
        return target

    return add


def named(reward: Callable[..., Any] | str | None, **data: Data | None) -> dict[str, Any]:
    """Returns the settings that name a reward function and data sets."""
    found: dict[str, Any] = {}
    if callable(reward):
        name = getattr(reward, "__name__", "")
        name = name if name.isidentifier() else "reward"
        register("reward.path", name)(reward)
        reward = f"{registered.__name__}:{name}"
    if reward is not None:
        found |= {"reward": "function", "reward.path": reward}
    for name, rows in data.items():
        if rows is not None:
            key = {"data": "data.path", "eval_data": "data.eval_path"}[name]
            found[key] = str(rows) if isinstance(rows, str | Path) else str(write_rows(rows))
    return found


def write_rows(data: Iterable[Any]) -> Path:
    """Writes rows to a file whose name follows from its content, so that a resumed run finds the same one."""
    if hasattr(data, "to_dict") and not isinstance(data, Mapping):  # datasets.Dataset has both methods
        data = data.to_list() if hasattr(data, "to_list") else data.to_dict("records")
    rows = [{"prompt": row} if isinstance(row, str) else row for row in data]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path = ROWS / f"{sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
    return path.absolute()


def overrides(settings: Settings) -> list[str]:
    """Returns settings as arguments of the command line."""
    return [f"{key}={in_hydra(value)}" for key, value in settings.items()]


def in_hydra(value: Any) -> str:
    """Writes a value in the grammar of Hydra, which reads unquoted text such as 1e-6 or null as a value."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(in_hydra, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = str(value)
    if re.fullmatch(r"[A-Za-z_][\w./:-]*", text) and text.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    ):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def read_table(path: Path) -> pandas.DataFrame:
    import pandas

    return pandas.read_json(path, lines=True)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Restores the handlers of signals, which a run replaces, and the notebook's pipe of signals."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
