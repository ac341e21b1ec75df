"""Imports a user's function or class by its path, and finds its file and line.

Worker processes use this module too. It must not import torch, so that they start fast.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache, partial, reduce
from itertools import dropwhile
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal
from zlib import crc32

from ppo_ds.config.registry import where_import_failed
from ppo_ds.config.similar_paths import did_you_mean_path
from ppo_ds.errors import UserError

TRIAL_RESPONSE = "This is a trial response."  # the argument of calls before models are loaded


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether calling ``function`` (a function or callable object) returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def load_object(path: str, key: str, kind: Literal["function", "class"]) -> Any:
    """Imports the object at ``pkg.mod:name`` or ``file.py:name``; raises UserError naming ``key``."""
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise UserError(f"{key}={path}: must be pkg.mod:{kind} or file.py:{kind}")
    is_file = source.endswith(".py")
    file = Path(source).expanduser().resolve()
    if is_file and not file.is_file():
        raise UserError(f"{key}={path}: no such file: {file}{did_you_mean_path(str(file))}")
    # sys.path contains the launch script's folder, not the current one. The user's folder is appended, so
    # that its files never hide an installed package. It is not removed, because functions may import modules
    # when they are called.
    folder = str(file.parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = _execute_file(file) if is_file else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {error}{where_import_failed(error)}"
        raise UserError(f"{key}={path}: cannot import {source}: {problem}") from error
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        is_kind = inspect.isclass if kind == "class" else inspect.isfunction
        values = {name: value for name, value in vars(module).items() if is_kind(value)}
        own = [name for name, value in values.items() if value.__module__ == module.__name__]
        plural = "classes" if kind == "class" else "functions"
        raise UserError(
            f"{key}={path}: {source} has no {name}; its {plural} are: {', '.join(own) or 'none'}"
        ) from None


def where_defined(function: Callable[..., Any]) -> str:
    """Returns FILE:LINE of the definition of a function or callable object; "" if it has no Python code."""
    code = _code_of(function)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def where_raised(error: BaseException, function: Callable[..., Any]) -> str:
    """Returns FILE:LINE of the last traceback entry of ``error`` that is in the file of ``function``.

    If there is none, returns where the function is defined.
    """
    code = _code_of(function)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{one.filename}:{one.lineno}" for one in frames if code and one.filename == code.co_filename]
    return lines[-1] if lines else where_defined(function)


def user_traceback(error: BaseException) -> str:
    """Formats a traceback without the frames of ppo_ds and asyncio that lead to the user's code."""
    stdlib = sysconfig.get_path("stdlib")
    callers = (str(Path(__file__).parents[1]), *(f"{stdlib}/{name}" for name in ("asyncio", "concurrent")))
    frames = traceback.extract_tb(error.__traceback__)
    kept = dropwhile(lambda frame: frame.filename.startswith(callers), frames)
    return "".join([*traceback.format_list([*kept]), *traceback.format_exception_only(error)])


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    plain = inspect.unwrap(function)
    if isinstance(plain, partial):
        plain = inspect.unwrap(plain.func)
    return getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)


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
