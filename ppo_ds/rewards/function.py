"""A reward that is any Python function: ``fn(prompts, responses, rows) -> one float each``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from copy import deepcopy
from functools import cache, reduce
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import Answers, RewardError, TextReward, shown

_LARGEST = torch.finfo(torch.float32).max


class FunctionReward(TextReward):
    """``path`` is ``pkg.mod:fn`` or ``file.py:fn``. The function gets three lists of length B: prompts and responses as text, and the raw rows.

    It may do with these as it likes, for they are copies, and with torch's random numbers too: the next answers are drawn as if it had not.
    An exception inside the function is the user's own and goes through as it is, with a note on what was being scored.
    """

    def __init__(self, path: str, *, tokenizer: Tokenizer, key: str = "reward"):
        super().__init__(tokenizer)
        self._name = f"{key}.path={path}"
        self._function = load_function(path, f"{key}.path")

    def judge(self, answers: Answers) -> Tensor:
        prompts = [row["prompt_text"] for row in answers.rows]
        try:
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
                result = self._function(list(prompts), list(answers.texts), deepcopy(list(answers.rows)))
        except BaseException as error:  # sys.exit() too
            error.add_note(
                f"in {self._name}, scoring {len(prompts)} answers; row 0 has the prompt {shown(prompts[0])}"
            )
            raise
        return torch.tensor(self._floats(result, prompts), dtype=torch.float32, device="cpu")

    def _floats(self, result: Any, prompts: list[str]) -> list[float]:
        values = result.tolist() if hasattr(result, "tolist") else result  # numpy arrays and tensors
        if not isinstance(values, (list, tuple)):
            raise RewardError(
                f"{self._name} returned {_described(result)}; it must return a list of {len(prompts)} floats"
            )
        if len(values) != len(prompts):
            raise RewardError(f"{self._name} returned {len(values)} scores for {len(prompts)} responses")
        return [
            self._float(value, row, prompt)
            for row, (value, prompt) in enumerate(zip(values, prompts, strict=True))
        ]

    def _float(self, value: Any, row: int, prompt: str) -> float:
        try:
            number = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
        except (ValueError, RuntimeError):  # it is several
            number = None
        if not isinstance(number, Real) or not abs(number) <= _LARGEST:  # nan is not <= anything
            place = f"row {row}, prompt {shown(prompt)}"
            raise RewardError(
                f"{self._name} returned {_described(value)} for {place}; a score must be a finite number"
            )
        return float(number)


def load_function(path: str, key: str = "reward.path") -> Callable[..., Any]:
    """The callable at ``pkg.mod:fn`` or ``file.py:fn``, checked to take three arguments; UserError naming ``key`` if that cannot be."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise UserError(f"{key}={path}: must be pkg.mod:function or file.py:function")
    module = _file_module(path, place, key) if place.endswith(".py") else _module(path, place, key)
    try:
        function = reduce(getattr, name.split("."), module)
    except AttributeError:
        raise UserError(
            f"{key}={path}: {place} has no {name}; its functions are: {_functions(module)}"
        ) from None
    if isinstance(function, type) or not callable(function):
        raise UserError(
            f"{key}={path}: {_described(function)} is not a function; give one that takes (prompts, responses, rows)"
        )
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key}={path}: is an async function; give a plain one")
    _expect_three_arguments(function, path, key)
    return function


def _module(path: str, name: str, key: str) -> ModuleType:
    _importable(Path.cwd())  # sys.path begins with the folder of the launch script, not with that of the user
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}={path}: cannot import {name}: {_reason(error)}") from error


def _file_module(path: str, place: str, key: str) -> ModuleType:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{key}={path}: no such file: {file}")
    _importable(file.parent)
    try:
        return _executed(file)
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}={path}: cannot import {place}: {_reason(error)}") from error


@cache
def _executed(file: Path) -> ModuleType:
    """Once in a process, like any module."""
    # a name of its own: the user's math.py must not become `math`, nor one score.py another
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


def _importable(folder: Path) -> None:
    """At the end, so that the user's files never hide an installed package. For good: functions may import when they are called."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _reason(error: BaseException) -> str:
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename != __file__ and "importlib" not in f.filename
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _functions(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return ", ".join(own) or "none"


def _expect_three_arguments(function: Callable[..., Any], path: str, key: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind([], [], [])
    except TypeError as error:
        raise UserError(
            f"{key}={path}: is called as fn(prompts, responses, rows), but takes {signature}: {error}"
        ) from None


def _described(value: Any) -> str:
    return f"{shown(str(value))} ({type(value).__name__})"
