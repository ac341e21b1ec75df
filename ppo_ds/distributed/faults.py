"""Fault injection for tests: the variable PPO_DS_FAULT makes this process fail at a marked place.

The variable is unset in every real run. It has one fault, or several separated by spaces:

    PPO_DS_FAULT="kill@checkpoint.after_actor:rank=1"
    PPO_DS_FAULT="raise@update:at=3 slow@checkpoint.write:rank=1:seconds=5"

The form is ACTION@PLACE followed by options: ``rank`` (default: all ranks), ``at`` (the visit to the place at
which the fault first occurs, counted from 1; default 1), ``times`` (the number of visits at which it occurs;
default 1; 0: unlimited) and ``seconds`` (duration of slow). Actions:

    kill    SIGKILL to this process        stop   SIGTERM to this process
    raise   a RuntimeError                 full   the OSError of a full disk
    hang    sleep without end              slow   sleep ``seconds``
    memory  an OutOfMemoryError of torch
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter

import torch

visits: Counter[str] = Counter()  # number of visits by place


def fault(place: str) -> None:
    """Applies the fault, if any, that PPO_DS_FAULT requests at ``place``."""
    requested = os.environ.get("PPO_DS_FAULT")
    if requested is None:
        return
    visits[place] += 1
    rank = os.environ.get("RANK", "0")
    for request in requested.split():
        action, _, condition = request.partition("@")
        where, *options = condition.split(":")
        given = dict(option.split("=") for option in options)
        visit, times = visits[place] - int(given.get("at", 1)), int(given.get("times", 1))
        if where != place or given.get("rank", rank) != rank or not 0 <= visit < (times or visit + 1):
            continue
        if action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGTERM)
        elif action == "raise":
            raise RuntimeError(f"fault at {place}")
        elif action == "memory":
            raise torch.OutOfMemoryError(f"fault at {place}")
        elif action == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
        elif action in ("hang", "slow"):
            time.sleep(float(given["seconds"]) if action == "slow" else 1e9)
        else:
            raise AssertionError(f"PPO_DS_FAULT={request}: no such action")
