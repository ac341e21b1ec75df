"""Keys, tokens and passwords have no place in a config: it is written to config.yaml, checkpoints and wandb, and quoted in error lines.

They belong into environment variables, which are never written down. What is found here is refused before anything is written, and not repeated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

_VARIABLE = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$"
)  # HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ...
_SHORTEST = (
    8  # characters of a variable's value that is looked for: a shorter one could stand anywhere by chance
)
_KEY = re.compile(r"(^|_)(api_?key|access_key|secret|passwd|password|authorization)$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # https://me:password@host
_QUERY = re.compile(
    r"([?&](?:\w*(?:key|token|secret|passw\w*|signature)|sig|auth|code)=)[^&\s]+", re.IGNORECASE
)  # of an address
_TOKEN = re.compile(
    r"\b(sk-|hf_|gh[pousr]_|wandb_v1_|xox[abp]-|AKIA)[\w-]{16,}|\bBearer\s+[\w.~+/=-]{8,}"
)  # as services write theirs
_REMEDY = "the config is written to files and shown; put it into an environment variable (a remote reward's: key_env) and leave it out here"


def secrets_in(tree: Any, key: str = "") -> Iterator[str]:
    """A line for each text of a config that holds a secret; the secret itself is not in it."""
    if isinstance(tree, dict):
        for name, item in tree.items():
            yield from secrets_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list | tuple):
        for i, item in enumerate(tree):
            yield from secrets_in(item, f"{key}[{i}]")
    elif isinstance(tree, str):
        variables = [name for name, value in _environment() if value in tree]
        if variables:
            yield f"{key}: holds the value of the environment variable {variables[0]}; {_REMEDY}"
        elif (
            _TOKEN.search(tree)
            or _USER.search(tree)
            or ("://" in tree and _QUERY.search(tree))
            or (tree and _KEY.search(key.rpartition(".")[2]))
        ):
            yield f"{key}: holds what looks like a password or a key; {_REMEDY}"


def censored(text: str) -> str:
    """The text with stars in place of what looks like a secret."""
    for _, value in _environment():
        text = text.replace(value, "***")
    return _QUERY.sub(r"\1***", _USER.sub("***", _TOKEN.sub("***", text)))


def _environment() -> list[tuple[str, str]]:
    return [
        (name, value)
        for name, value in os.environ.items()
        if _VARIABLE.search(name) and len(value) >= _SHORTEST
    ]
