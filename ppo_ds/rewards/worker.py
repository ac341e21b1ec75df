"""Worker process of a reward function: receives one call at a time and sends its scores back.

It is a new interpreter, because a fork of a process that uses CUDA may deadlock. It does not import torch.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from zlib import crc32

from ppo_ds.background.user_code import is_async, user_traceback, where_raised
from ppo_ds.background.values import NoResult
from ppo_ds.distributed.child_groups import PR_SET_PDEATHSIG, prctl
from ppo_ds.errors import UserError
from ppo_ds.rewards.user_function import Arguments, InvalidScore, call_function, load_function


def main(descriptor: int, parent: int, path: str) -> None:
    """Serves the calls received on ``descriptor`` until the parent process ``parent`` closes it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the parent, on Linux only
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)
    if isinstance(sys.stdout, io.TextIOWrapper):  # prints appear at once, also in a file
        sys.stdout.reconfigure(line_buffering=True)
    connection = Connection(descriptor)
    try:
        function = load_function(path)
    except UserError as error:
        send(connection, {"broken": str(error)})
        return
    send(connection, {"ready": True})
    with asyncio.Runner() as runner:
        while True:
            try:
                number, arguments = connection.recv()
            except EOFError:
                return
            send(connection, {"call": number, **call(function, arguments, runner)})


def call(function: Callable[..., Any], arguments: Arguments, runner: asyncio.Runner) -> dict[str, Any]:
    """Calls the function and returns a reply of plain values for JSON."""
    prompts, responses, _ = arguments
    seed(crc32("\0".join([*prompts, *responses]).encode(errors="surrogatepass")))
    try:
        if is_async(function):
            return {"scores": call_function(function, arguments, runner.run)}
        return {"scores": call_function(function, arguments)}
    except NoResult as error:
        return {"no_result": str(error)}
    except InvalidScore as error:
        return {"invalid": str(error), "row": error.row, "remedy": error.remedy}
    except BaseException as error:  # also SystemExit
        line = traceback.format_exception_only(error)[-1].strip()
        where = where_raised(error, function)
        return {"raised": line, "where": where, "traceback": user_traceback(error)}


def seed(number: int) -> None:
    """Seeds the random generators of this process.

    A function that draws random numbers then returns the same score in any worker and in any order.
    """
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def send(connection: Connection, reply: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(reply).encode())
