"""Faults on purpose, so that tests hit each for certain: PPO_DS_FAULT, unset in every real run.

    PPO_DS_FAULT="kill@checkpoint.after_actor:rank=1"       one fault, or several with spaces between
    PPO_DS_FAULT="nan@loss.actor:at=3 slow@checkpoint.write:rank=1:seconds=5"

ACTION@PLACE, then options: ``rank`` (default: all), ``at`` (the how-manieth time the place is reached, from 1; default 1), ``times`` (how often from
then on, default 1; 0: for ever), ``seconds`` (of slow). Actions:

    kill    SIGKILL to this process        stop   SIGTERM to this process
    raise   a RuntimeError                 full   the OSError of a full disk
    hang    sleep for ever                 slow   sleep ``seconds``
    nan     ``fault`` returns True, and the caller spoils what it is about to use
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter

_reached: Counter[str] = Counter()


def fault(place: str) -> bool:
    """Marks a place at which a test can have this process fail. True: what is computed here is to become NaN."""
    asked = os.environ.get("PPO_DS_FAULT")
    if asked is None:
        return False
    _reached[place] += 1
    return any([_act(action, place) for action in asked.split() if _is_due(action, place)])


def _is_due(asked: str, place: str) -> bool:
    where, *options = asked.partition("@")[2].split(":")
    given = dict(option.split("=") for option in options)
    me = os.environ.get("RANK", "0")
    since, times = _reached[place] - int(given.get("at", 1)), int(given.get("times", 1))
    return where == place and given.get("rank", me) == me and 0 <= since < (times or since + 1)


def _act(asked: str, place: str) -> bool:
    action = asked.partition("@")[0]
    if action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGTERM)
    elif action == "raise":
        raise RuntimeError(f"fault at {place}")
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
    elif action in ("hang", "slow"):
        _, _, seconds = asked.partition("seconds=")
        time.sleep(float(seconds.split(":")[0]) if action == "slow" else 1e9)
    else:
        assert action == "nan", f"PPO_DS_FAULT={asked}: no such action"
    return action == "nan"
