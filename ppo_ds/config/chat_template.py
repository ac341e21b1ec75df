"""Reads ``data.chat_template``.

A run and its checkpoints hold the text of the template, not the path of its file. So a checkpoint can be
exported when the file is gone, and a checkpoint from someone else cannot name a file of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_ds.config.schema import Config
from ppo_ds.config.types import replace
from ppo_ds.errors import UserError
from ppo_ds.secrets import secrets_in


def is_template(text: str) -> bool:
    """Returns whether a text is a Jinja template; otherwise it is the path of a file."""
    return "{{" in text or "{%" in text


def template_text(given: str) -> str:
    """Returns the template that ``given`` holds or names; raises UserError for a file without a template."""
    if is_template(given):
        return given
    try:
        text = Path(os.path.expanduser(given)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"data.chat_template={given}: neither a Jinja template nor a file that can be read ({reason})"
        ) from error
    if not is_template(text):
        raise UserError(f"data.chat_template={given}: the file holds no Jinja template (no {{{{ or {{%)")
    if secrets := list(secrets_in({"data": {"chat_template": text}})):
        raise UserError(*secrets)
    return text


def with_template_text(config: Config) -> Config:
    """Returns a config whose ``data.chat_template``, if it has one, is the text of the template."""
    given = config.data.chat_template if "data" in type(config).model_fields else None
    if given is None:
        return config
    return replace(config, data=replace(config.data, chat_template=template_text(given)))


def settings_with_template_text(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns settings of an older version with the current text of the file that they name, if it exists."""
    data = settings.get("data") or {}
    try:
        return {**settings, "data": {**data, "chat_template": template_text(data["chat_template"])}}
    except (KeyError, TypeError, UserError):  # no template, or no file any more: compared as it is
        return settings
