"""Imports a user's reward function, calls it and reads what it returns.

Worker processes use this module too, so it imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial, reduce
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from zlib import crc32

from ppo_ds.config.similar_paths import did_you_mean_path
from ppo_ds.errors import UserError
from ppo_ds.rewards.values import described, is_float32

Score = float | list[float]  # score of one response; a list has one reward for each step
Arguments = tuple[list[str], list[str], list[Any]]  # prompts, responses and rows of one call

_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "function": ("functions", inspect.isfunction),
    "class": ("classes", inspect.isclass),
}


class InvalidScore(ValueError):
    """Raised for a return value that is not one score for each response."""

    def __init__(self, reason: str, row: int | None = None, remedy: str = ""):
        super().__init__(reason)  # a phrase that follows the name of the function in an error message
        self.reason = reason
        self.row = row  # index of the response; None if the reason is not about a single response
        self.remedy = remedy


def read_scores(result: Any, count: int) -> list[Score]:
    """Converts what a reward function returned for ``count`` responses; raises InvalidScore.

    The result may be a list or tuple, or an array of numpy, torch or pandas. Each entry is a number, or a
    list of numbers, which may be scalars of these libraries too.
    """
    values = _plain(result)
    if not isinstance(values, (list, tuple)):
        raise InvalidScore(f"returned {described(result)}", remedy=f"it must return a list of {count} floats")
    if len(values) != count:
        raise InvalidScore(f"returned {len(values)} scores for {count} responses")
    return [_read_score(value, row) for row, value in enumerate(values)]


def _read_score(value: Any, row: int) -> Score:
    score = _plain(value)
    if not isinstance(score, (list, tuple)):
        if not is_float32(score):
            raise InvalidScore(f"returned {described(value)}", row, "a score must be a finite number")
        return float(score)
    rewards = [_plain(reward) for reward in score]
    for step, reward in enumerate(rewards, start=1):
        if not is_float32(reward):
            reason = f"returned {described(reward)} as the reward of step {step}"
            raise InvalidScore(reason, row, "the reward of a step must be a finite number")
    return [float(reward) for reward in rewards]


def _plain(value: Any) -> Any:
    """Converts arrays and scalars of numpy, torch or pandas to lists and numbers of Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def call_function(
    function: Callable[..., Any], arguments: Arguments, finish: Callable[[Any], Any] = lambda result: result
) -> list[Score]:
    """Calls a reward function and reads its scores; ``finish`` computes the result of a coroutine."""
    count = len(arguments[0])  # before the call, since the function may modify the lists
    return read_scores(finish(function(*arguments)), count)


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether a call of ``function`` gives a coroutine; it may be an object with an async call."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def load_function(
    path: str, key: str = "reward.path", parameters: tuple[str, ...] = ("prompts", "responses", "rows")
) -> Callable[..., Any]:
    """Imports the function at ``pkg.mod:fn`` or ``file.py:fn`` and checks that it takes these arguments.

    Raises UserError naming ``key`` if it cannot be imported or is not such a function.
    """
    function = load_object(path, key, "function")
    if isinstance(function, type) or not callable(function):
        raise UserError(
            f"{key}={path}: {described(function)} is not a function; give one that takes "
            f"({', '.join(parameters)})"
        )
    try:
        inspect.signature(function).bind(*([] for _ in parameters))
    except ValueError:
        pass  # some builtins have no signature
    except TypeError as error:
        raise UserError(
            f"{key}={path}: is called as fn({', '.join(parameters)}), but takes "
            f"{inspect.signature(function)}: {error}"
        ) from None
    return function


def load_object(path: str, key: str, kind: str) -> Any:
    """Imports the object at ``pkg.mod:name`` or ``file.py:name``.

    ``kind`` is function or class. Raises UserError naming ``key`` if the object cannot be imported. If the
    module lacks the name, the error lists the module's own objects of that kind.
    """
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise UserError(f"{key}={path}: must be pkg.mod:{kind} or file.py:{kind}")
    module = _import_source(source, f"{key}={path}")
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        plural, is_kind = _KINDS[kind]
        own = [
            name
            for name, value in vars(module).items()
            if is_kind(value) and value.__module__ == module.__name__
        ]
        raise UserError(
            f"{key}={path}: {source} has no {name}; its {plural} are: {', '.join(own) or 'none'}"
        ) from None


def where_defined(function: Callable[..., Any]) -> str:
    """Returns FILE:LINE of the definition of a function or callable object; "" if it has no Python code."""
    code = _code_of(function)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def where_raised(error: BaseException, function: Callable[..., Any]) -> str:
    """Returns FILE:LINE of the last line in the file of ``function`` that ran before an exception.

    If the exception passed no line of that file, for example because a decorator of another file raised it,
    returns where the function is defined.
    """
    code = _code_of(function)
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if code and frame.filename == code.co_filename
    ]
    return lines[-1] if lines else where_defined(function)


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    plain = inspect.unwrap(function)
    if isinstance(plain, partial):
        plain = inspect.unwrap(plain.func)
    return getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)


def _import_source(source: str, setting: str) -> ModuleType:
    """Imports ``pkg.mod`` or ``file.py``; ``setting`` is the config entry that error messages name."""
    is_file = source.endswith(".py")
    file = Path(source).expanduser().resolve()
    if is_file and not file.is_file():
        raise UserError(f"{setting}: no such file: {file}{did_you_mean_path(str(file))}")
    # sys.path contains the launch script's folder, not the current one. The user's folder is appended, so
    # that its files never hide an installed package. It is not removed, because functions may import modules
    # when they are called.
    folder = str(file.parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return _execute_file(file) if is_file else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__ and "importlib" not in frame.filename
        ]
        location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise UserError(
            f"{setting}: cannot import {source}: {type(error).__name__}: {error}{location}"
        ) from error


@cache
def _execute_file(file: Path) -> ModuleType:
    """Imports a file as a module, once per process."""
    # A unique name keeps the user's math.py from replacing `math`, and one score.py from replacing another.
    name = f"_reward_of_{file.stem}_{crc32(str(file).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
