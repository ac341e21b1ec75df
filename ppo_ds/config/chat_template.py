"""Reads the chat template of ``data.chat_template``, given as text or as the path of a file.

A run and its checkpoints store the text of the template, not the path of its file. Therefore a checkpoint can
be exported after the file was deleted, and a checkpoint from an untrusted source cannot make this machine
read one of its files.
"""

from __future__ import annotations

import os
from pathlib import Path

from ppo_ds.errors import UserError
from ppo_ds.secrets import secrets_in


def is_template(text: str) -> bool:
    """Returns whether a text is a Jinja template rather than the path of a file."""
    return "{{" in text or "{%" in text


def template_text(given: str) -> str:
    """Returns ``given`` if it is a template, otherwise the text of the file at the path ``given``.

    Raises UserError if the file cannot be read, is not a template or contains a secret.
    """
    if is_template(given):
        return given
    try:
        text = Path(os.path.expanduser(given)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a valid path
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"data.chat_template={given}: neither a Jinja template nor a file that can be read ({reason})"
        ) from error
    if not is_template(text):
        raise UserError(f"data.chat_template={given}: the file holds no Jinja template (no {{{{ or {{%)")
    if secrets := list(secrets_in({"data": {"chat_template": text}})):
        raise UserError(*secrets)
    return text
