"""A reward computed by a Python function: ``fn(prompts, responses, rows)`` returns one float per response."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from copy import deepcopy
from functools import cache, reduce
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import Responses, RewardError, TextReward, is_float32, quoted


class FunctionReward(TextReward):
    """Scores responses with the function at ``path``, which is ``pkg.mod:fn`` or ``file.py:fn``.

    The function gets three lists of length B: prompts and responses as text, and the raw rows. The lists are
    copies that it may modify. The state of torch's random generators is restored after each call, so that
    the function does not change what the run samples next. An exception raised inside the function
    propagates unchanged, with a note that names the first prompt.
    """

    def __init__(self, path: str, *, tokenizer: Tokenizer, key: str = "reward"):
        super().__init__(tokenizer)
        self._name = f"{key}.path={path}"
        self._function = load_function(path, f"{key}.path")

    def score_responses(self, responses: Responses) -> Tensor:
        prompts = [row["prompt_text"] for row in responses.rows]
        try:
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
                result = self._function(list(prompts), list(responses.texts), deepcopy(list(responses.rows)))
        except BaseException as error:  # also SystemExit
            error.add_note(
                f"in {self._name}, scoring {len(prompts)} responses; row 0 has the prompt "
                f"{quoted(prompts[0])}"
            )
            raise
        values = result.tolist() if hasattr(result, "tolist") else result  # from numpy, torch or pandas
        if not isinstance(values, (list, tuple)):
            raise RewardError(
                f"{self._name} returned {_describe(result)}; it must return a list of {len(prompts)} floats"
            )
        if len(values) != len(prompts):
            raise RewardError(f"{self._name} returned {len(values)} scores for {len(prompts)} responses")
        scores = [self._to_float(value, row, prompts[row]) for row, value in enumerate(values)]
        return torch.tensor(scores, dtype=torch.float32, device="cpu")

    def _to_float(self, value: Any, row: int, prompt: str) -> float:
        """Converts one score, which may be a numpy or torch scalar."""
        try:
            number = value.item() if hasattr(value, "item") else value
        except (ValueError, RuntimeError):  # raised for an array of several elements
            number = None
        if not is_float32(number):
            raise RewardError(
                f"{self._name} returned {_describe(value)} for row {row}, prompt {quoted(prompt)}; "
                "a score must be a finite number"
            )
        return float(number)


def load_function(path: str, key: str = "reward.path") -> Callable[..., Any]:
    """Imports the function at ``pkg.mod:fn`` or ``file.py:fn`` and checks that it takes three arguments.

    Raises UserError naming ``key`` if it cannot be imported or is not such a function.
    """
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise UserError(f"{key}={path}: must be pkg.mod:function or file.py:function")
    module = _import_source(source, f"{key}={path}")
    try:
        function = reduce(getattr, name.split("."), module)
    except AttributeError:
        functions = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise UserError(
            f"{key}={path}: {source} has no {name}; its functions are: {', '.join(functions) or 'none'}"
        ) from None
    if isinstance(function, type) or not callable(function):
        raise UserError(
            f"{key}={path}: {_describe(function)} is not a function; give one that takes (prompts, "
            "responses, rows)"
        )
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key}={path}: an async function is not supported; give a plain function")
    try:
        inspect.signature(function).bind([], [], [])
    except ValueError:
        pass  # some builtins have no signature
    except TypeError as error:
        raise UserError(
            f"{key}={path}: is called as fn(prompts, responses, rows), but takes "
            f"{inspect.signature(function)}: {error}"
        ) from None
    return function


def _import_source(source: str, setting: str) -> ModuleType:
    """Imports ``pkg.mod`` or ``file.py``; ``setting`` is the config entry that error messages name."""
    is_file = source.endswith(".py")
    file = Path(source).expanduser().resolve()
    if is_file and not file.is_file():
        raise UserError(f"{setting}: no such file: {file}")
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


def _describe(value: Any) -> str:
    return f"{quoted(str(value))} ({type(value).__name__})"
