"""Detects keys, tokens and passwords in a config and removes them from texts.

A config is written to config.yaml, checkpoints and wandb and is quoted in error messages, so secrets must be
passed in environment variables, which are never written. A secret found in a config is refused before
anything is written, and the error does not repeat it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ...
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$")
_MIN_CHARACTERS = 8  # shorter values of such variables may occur in any text by chance
_SECRET_KEY = re.compile(r"(^|_)(api_?key|access_key|secret|passwd|password|authorization)$", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # https://me:password@host
_URL_QUERY = re.compile(
    r"([?&](?:\w*(?:key|token|secret|passw\w*|signature)|sig|auth|code)=)[^&\s]+", re.IGNORECASE
)
# the token formats of OpenAI, Hugging Face, GitHub, wandb, Slack and AWS, and bearer headers
_TOKEN = re.compile(r"\b(sk-|hf_|gh[pousr]_|wandb_v1_|xox[abp]-|AKIA)[\w-]{16,}|\bBearer\s+[\w.~+/=-]{8,}")
_REMEDY = (
    "the config is written to files and shown; put it into an environment variable and leave it out here (a "
    "remote reward reads the variable that its key_env names)"
)


def secrets_in(tree: Any, key: str = "") -> Iterator[str]:
    """Yields one error line, without the secret itself, for each text of a config that holds a secret."""
    if isinstance(tree, dict):
        for name, item in tree.items():
            yield from secrets_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list | tuple):
        for i, item in enumerate(tree):
            yield from secrets_in(item, f"{key}[{i}]")
    elif isinstance(tree, str):
        variables = [name for name, value in _secret_variables() if value in tree]
        if variables:
            yield f"{key}: holds the value of the environment variable {variables[0]}; {_REMEDY}"
        elif (
            _TOKEN.search(tree)
            or _URL_USER.search(tree)
            or ("://" in tree and _URL_QUERY.search(tree))
            or (tree and _SECRET_KEY.search(key.rpartition(".")[2]))
        ):
            yield f"{key}: holds what looks like a password or a key; {_REMEDY}"


def censored(text: str) -> str:
    """Returns the text with everything that looks like a secret replaced by ``***``."""
    for _, value in _secret_variables():
        text = text.replace(value, "***")
    return _URL_QUERY.sub(r"\1***", _URL_USER.sub("***", _TOKEN.sub("***", text)))


def _secret_variables() -> list[tuple[str, str]]:
    return [
        (name, value)
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= _MIN_CHARACTERS
    ]
