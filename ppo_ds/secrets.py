"""Detects keys, tokens and passwords in a config, which is then rejected; redacts them in texts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ...
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)$|(^|_)(PASS|PAT)$")
_MIN_CHARACTERS = 8  # shorter values are ignored: they may occur in any text by chance
# Names of config keys that hold secrets, in lower case with underscores. Keys such as eos_token and
# stop_token do not match.
_SECRET_KEY = re.compile(
    r"(^|_)(api_?keys?|access_?keys?|private_?keys?|secrets?|secret_?keys?|passwd|pwd|passwords?|pass_?phrase"
    r"|authorization|auth|bearer|credentials?|cookie|jwt"
    r"|(encryption|openai|anthropic|google|groq|judge|wandb|hf)_?keys?"
    r"|(api|auth|access|bearer|refresh|session|security|hf|hub|github|gitlab|slack|wandb)_?tokens?)$"
    r"|^tokens?$"
)
# https://me:password@host; a password may contain a slash, but https://host:80/@me has no password
_URL_USER = re.compile(r"(?<=://)(?:[^/\s@]+|[^/\s@:]{1,200}:(?!\d+/)[^\s@]{1,200})(?=@)")
_URL_QUERY = re.compile(r"([?&](\w+)=)[^&\s]+")
_SECRET_PARAMETER = re.compile(
    r"(^|_|api|access)key$|(token|secret|signature)$|passw|^(sig|auth|code)$", re.IGNORECASE
)
_TOKEN = re.compile(
    r"\b(?:"
    r"sk-(?=[A-Za-z_-]{0,200}+\d)[\w-]{16,}"  # OpenAI, Anthropic and others; "sk-learn-..." has no digit
    r"|hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|(?:gh[pousr]_|github_pat_)\w{16,}"  # GitHub
    r"|glpat-[\w-]{16,}"  # GitLab
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AccountKey=[\w+/]{16,}"  # AWS, Azure
    r"|AIza[\w-]{30,}|ya29\.[\w-]{16,}"  # Google
    r"|(?:gsk|r8|npm|fw)_[A-Za-z0-9]{20,}"  # Groq, Replicate, npm, Fireworks
    r"|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"  # Stripe
    r"|(?:nvapi|pplx|xai|pypi|csk|tvly)-[\w-]{20,}"  # NVIDIA, Perplexity, xAI, PyPI, Cerebras, Tavily
    r"|(?:tgp_v1|lsv2_[a-z]{2}|dckr_pat)_[\w-]{20,}"  # Together, LangSmith, Docker
    r"|dapi[0-9a-f]{32}|SG(?:\.[\w-]{16,}){2}|hvs\.[A-Za-z0-9]{20,}"  # Databricks, SendGrid, Vault
    r"|wandb_v1_[\w-]{16,}|[A-Z_]{1,40}_(?:KEY|TOKEN|SECRET)=[\w+/-]{16,}"  # WANDB_API_KEY=...
    r"|xox[abeprs]-[\w-]{16,}|hooks\.slack\.com/services/[\w/]{16,}"  # Slack
    r"|eyJ[\w-]{8,2000}+\.eyJ[\w-]{8,}\.[\w-]*"  # JSON web token
    r"|Bearer\s+[\w.~+/=-]{8,}|Authorization\W{1,4}Basic\s+[\w+/=-]{8,}"
    r")|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?(?:-----(?:(?!-----)[\s\S])*+)?"
)
_REMEDY = (
    "the config is written to files and shown; put it into an environment variable and leave it out here (a "
    "remote reward reads the variable that its key_env names)"
)


def secrets_in(tree: Any, key: str = "", inside_secret: bool = False) -> Iterator[str]:
    """Yields one error line, without the secret itself, for each value of a config that holds a secret.

    ``inside_secret`` is True if a section that contains ``tree`` has the name of a secret. A number counts as
    a secret only if its key or a section around it has such a name, and the key does not end with "token(s)".
    """
    last = re.sub(r"(\[\d+\])+$", "", key.rpartition(".")[2])  # x-api-key, apiKey, token
    words = re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last)).lower()
    named = inside_secret or _SECRET_KEY.search(words) is not None
    if isinstance(tree, dict):
        for name, item in tree.items():
            if _TOKEN.search(str(name)):
                yield f"{key or 'config'}: has a key that looks like a password or a key; {_REMEDY}"
            else:
                yield from secrets_in(item, f"{key}.{name}" if key else str(name), named)
    elif isinstance(tree, list | tuple):
        for i, item in enumerate(tree):
            yield from secrets_in(item, f"{key}[{i}]", named)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        if named and not re.search(r"(?i)tokens?(\[\d+\])*$", key):
            yield f"{key}: holds what looks like a password or a key; {_REMEDY}"
    elif isinstance(tree, str):
        variables = [name for name, value in _secret_variables() if value in tree]
        if variables:
            yield f"{key}: holds the value of the environment variable {variables[0]}; {_REMEDY}"
        elif (
            _TOKEN.search(tree)
            or _URL_USER.search(tree)
            or ("://" in tree and any(_SECRET_PARAMETER.search(name) for _, name in _URL_QUERY.findall(tree)))
            or (tree and named)
        ):
            yield f"{key}: holds what looks like a password or a key; {_REMEDY}"


def censored(text: str) -> str:
    """Returns the text with everything that looks like a secret replaced by ``***``."""
    for _, value in _secret_variables():  # also as quoted by KeyError and by JSON
        for spelling in (value, repr(value)[1:-1], json.dumps(value)[1:-1]):
            text = text.replace(spelling, "***")
    text = _URL_USER.sub("***", _TOKEN.sub("***", text))
    return _URL_QUERY.sub(lambda m: m[1] + "***" if _SECRET_PARAMETER.search(m[2]) else m[0], text)


def censored_tree(tree: Any) -> Any:
    """Returns a copy of nested dicts and lists in which all strings, keys included, are censored."""
    if isinstance(tree, dict):
        return {censored_tree(name): censored_tree(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [censored_tree(item) for item in tree]
    return censored(tree) if isinstance(tree, str) and len(tree) >= _MIN_CHARACTERS else tree


def is_secret_variable(name: str) -> bool:
    """Returns whether an environment variable of this name holds a key or a password."""
    return _SECRET_VARIABLE.search(name) is not None


def _secret_variables() -> list[tuple[str, str]]:
    return [
        (name, value.strip())
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and len(value.strip()) >= _MIN_CHARACTERS
    ]
