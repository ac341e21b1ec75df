"""Trains and evaluates from Python with the code of the commands, in one process that continues afterwards.

    from ppo_ds import train

    result = train("grpo", {"actor.model.path": "Qwen/Qwen2.5-0.5B-Instruct"}, reward=score, data=rows)
    result.metrics.plot(y="reward/score_mean")

Errors are raised: UserError, a ValueError, for mistakes in arguments, data and models, and RunError for a run
that ends with an error. docs/python.md describes the functions.
"""

from __future__ import annotations

import gc
import html
import inspect
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ppo_ds.config.schema import OPEN_VARIANTS, PPOConfig, add_own_code
from ppo_ds.config.types import Variants
from ppo_ds.errors import RunError, UserError
from ppo_ds.storage.drafts import write_file
from ppo_ds.storage.reading import read_json
from ppo_ds.tracking.jsonl import read_rows
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
HYDRAS_WORDS = ("null", "true", "false", "nan", "inf")  # Hydra reads them as text only in quotes
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
        """The metrics of all steps, one row per step, including steps before a resume."""
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
    """Calls a function after each step. If it raises an exception, the run saves this step and ends."""

    def __init__(self, call: Callable[[int, Record], object] | None):
        if call is not None:
            check_callable("on_step", call, (1, {}))
        self._call = call
        self.error: Exception | None = None
        self.stop: Callable[[str], None] = lambda reason: None

    def log(self, step: int, metrics: Record) -> None:
        try:
            if self._call is not None:
                self._call(step, metrics)
        except Exception as error:
            error.add_note(f"in on_step; step {step} is saved, and the same call continues after it")
            self.error = error
            self.stop("an exception of on_step")


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

    Ctrl-C ends the run after the current step, with a checkpoint; the same call continues the run.

    Args:
        experiment: An option of conf/experiment, such as grpo, rlhf, sft or quickstart.
        settings: Config keys and groups with their values, such as {"run.steps": 20, "algo": "rloo"}.
        reward: A function (prompts, responses, rows) -> scores, or its path, as in reward.path.
        data: The training data, as data.path or as rows: see ``Data``. Rows are written to outputs/rows.
        eval_data: The held-out data, in the same forms as ``data``.
        on_step: Called as (step, metrics) after each step. An exception ends the run and is raised.
    """
    given = all_settings(settings, named(reward, data=data, eval_data=eval_data))
    check_process()
    after_step = OnStep(on_step)
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

        with signals_restored():
            run = build_run(config, mark_ending=lock.mark_ending, trackers=[after_step])
            after_step.stop = run.context.stop.request
            try:
                reason = run.fit()
            except BaseException as error:
                run.fail(error)
                raise
        if after_step.error is not None:
            raise after_step.error
        if EXIT_CODES[reason] == 1:
            raise RunError(run.error or reason)
    finally:
        lock.release()
        gc.collect()  # frees the models
    return Training(run_dir, read_json(run_dir / "summary.json"))


def evaluate(
    *models: str | Path,
    settings: Settings | None = None,
    reward: Callable[..., Any] | str | None = None,
    data: Data | None = None,
    samples: int | None = None,
    by: str | None = None,
    judge: Callable[..., Any] | str | None = None,
    names: Sequence[str] | None = None,
    out: str | Path = "outputs/evaluation",
) -> Comparison:
    """Compares models as ``python launch/evaluate.py MODEL ... KEY=VALUE ...`` does, in this process.

    Args:
        models: Run directories, model folders, adapters or Hub names; all are compared with the first one.
        settings, reward, data: As for ``train``.
        samples: Sampled responses to each prompt, for pass@k; None: one greedy response.
        by: A column of the data; scores are also compared for each value of this column.
        judge: A function that judges pairs of responses, or its path; see docs/evaluation.md.
        names: The names of the models in the results.
        out: The folder of the results.
    """
    given = all_settings(settings, named(reward, data=data))
    joined = None if names is None else ",".join(names)
    chosen = {"samples": samples, "by": by, "judge": path_of("judge", judge), "names": joined, "out": out}
    options = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    wanted = evaluate_command.parse([*options, *map(str, models), *overrides(given)])
    evaluate_command.create_folder(wanted.out)
    prepare_environment(wanted.config.run.verbose, trains=True)
    paths = [model.path for model in wanted.models if not looks_local(model.path)]
    use_caches_without_the_hub([*paths, *hub_names(wanted.config)])
    evaluate_command.run_evaluation(wanted)
    return Comparison(wanted.out, read_json(wanted.out / evaluate_command.RESULT))


def register(key: str, name: str | None = None) -> Callable[[T], T]:
    """Returns a decorator that makes a function or class a value of ``key`` in this process.

    The value is ``name`` (default: the name of the function or class); for reward.path it is
    ``ppo_ds.registered:NAME``. Code in a module needs no registration: algo.policy.loss=package.module.name.

    Args:
        key: One of four keys. algo.policy.loss accepts a function (PolicyTerms, section) -> TokenLoss or a
            class derived from PolicyConfig. algo.advantage.estimator accepts a function (Responses,
            CreditOptions) -> Estimate or a class derived from AdvantageConfig. rollout.backend accepts a
            class that implements ppo_ds.rollout.base.Generator or one derived from RolloutConfig.
            reward.path accepts a function.
    """
    if key not in REGISTRIES:
        raise UserError(f"register({key!r}): must be one of {', '.join(REGISTRIES)}")
    section = REGISTRIES[key]

    def add(target: T) -> T:
        called = str(name or getattr(target, "__name__", ""))
        if not called.isidentifier():
            raise UserError(f"register({key!r}): {called!r} is not a name; give one as the second argument")
        if section is not None and called in section.variants and not hasattr(registered, called):
            raise UserError(f"register({key!r}): {called} is a value of ppo_ds itself; choose another name")
        if section is not None:
            add_own_code(key, called, target, f"{registered.__name__}.{called}")
        setattr(registered, called, target)
        return target

    return add


def check_process() -> None:
    """Raises UserError if ``train`` cannot run: on one of several ranks, or outside of the main thread."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: train() runs in one process; start several ranks with "
            "deepspeed launch/train.py"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UserError("train() was called in another thread than the main one, which receives signals")


def all_settings(settings: Settings | None, of_arguments: Settings) -> Settings:
    """Merges ``settings`` with those that other arguments imply; raises UserError if a key is in both."""
    if not isinstance(settings, Mapping | None):
        raise UserError(f"settings={settings!r}: must be a dict, such as {{'run.steps': 20}}")
    if twice := [key for key in of_arguments if key in (settings or {})]:
        raise UserError(f"{twice[0]}: is in settings and follows from another argument too; give one of them")
    return {**(settings or {}), **of_arguments}


def named(reward: Callable[..., Any] | str | None, **data: Data | None) -> dict[str, Any]:
    path = path_of("reward", reward)
    found: dict[str, Any] = {} if path is None else {"reward": "function", "reward.path": path}
    for name, rows in data.items():
        if rows is not None:
            key = {"data": "data.path", "eval_data": "data.eval_path"}[name]
            found[key] = str(rows) if isinstance(rows, str | Path) else str(write_rows(rows, name))
    return found


def path_of(argument: str, function: Callable[..., Any] | str | None) -> str | None:
    """Returns a path or None unchanged; registers a callable and returns its path in ppo_ds.registered."""
    if function is None or isinstance(function, str):
        return function
    check_callable(argument, function)
    name = getattr(function, "__name__", "")
    name = name if name.isidentifier() else argument
    register("reward.path", name)(function)
    return f"{registered.__name__}:{name}"


def check_callable(name: str, function: Any, arguments: Sequence[Any] | None = None) -> None:
    """Raises UserError unless ``function`` can be called, with ``arguments`` if they are given."""
    try:
        signature = inspect.signature(function)
        if arguments is not None:
            signature.bind(*arguments)
    except (TypeError, ValueError) as error:  # ValueError: a built-in function without a signature
        if not callable(function) or isinstance(error, TypeError):
            raise UserError(f"{name}={function!r}: cannot be called ({error})") from None


def write_rows(data: Iterable[Any], name: str = "data") -> Path:
    """Writes rows to a JSONL file, named by a hash of its content so that a resumed run uses it again."""
    if isinstance(data, Mapping) or not (isinstance(data, Iterable) or hasattr(data, "to_dict")):
        kind = type(data).__name__
        raise UserError(f"{name}: is a {kind}; give a path, a list of rows, or one split of a data set")
    if hasattr(data, "to_dict"):  # datasets.Dataset has both methods
        data = data.to_list() if hasattr(data, "to_list") else data.to_dict("records")
    lines = []
    for i, row in enumerate(data, start=1):
        try:
            whole = {"prompt": row} if isinstance(row, str) else dict(row)
            lines.append(json.dumps(whole, ensure_ascii=False, default=plain) + "\n")
        except (TypeError, ValueError) as error:
            must = "must be a text or a dict of texts, numbers and lists"
            raise UserError(f"{name}, row {i}: {must} ({error})") from None
    text = "".join(lines)
    path = ROWS / f"{sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
    return path.absolute()


def plain(value: Any) -> Any:
    """Converts objects that JSON lacks: arrays and numbers of numpy, and dates."""
    for convert in ("tolist", "isoformat"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def overrides(settings: Settings) -> list[str]:
    return [f"{key}={in_hydra(value)}" for key, value in settings.items()]


def in_hydra(value: Any) -> str:
    """Formats a value in Hydra's grammar. Quotes text such as 1e-6 or null, which Hydra would convert."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(in_hydra, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = str(value)
    if re.fullmatch(r"[A-Za-z_][\w./:-]*", text) and text.lower() not in HYDRAS_WORDS:
        return text
    return "'" + text.replace("'", "\\'") + "'"


def read_table(path: Path) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(read_rows(path))


@contextmanager
def signals_restored() -> Iterator[None]:
    """Restores, after the block, the signal handlers that a run replaces and the wakeup fd of a notebook."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
