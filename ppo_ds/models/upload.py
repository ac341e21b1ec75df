"""Uploads an exported folder to the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import HfApi

from ppo_ds.errors import UserError
from ppo_ds.secrets import censored

TOKEN = "HF_TOKEN"
NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def check_push(name: str) -> str:
    """Returns the environment's Hub token; raises UserError without one, or if ``name`` is not ORG/NAME."""
    if not NAME.fullmatch(name):
        raise UserError(f"--push={name}: must be ORG/NAME, such as your-name/my-model")
    if not (token := os.environ.get(TOKEN, "").strip()):
        raise UserError(
            f"--push={name}: {TOKEN} is not set; create a token with write access at "
            f"https://huggingface.co/settings/tokens and export it as {TOKEN}"
        )
    return token


def push(folder: Path, name: str, token: str, *, private: bool) -> str:
    """Uploads all files of ``folder`` as one commit to the repository ``name``; returns its address.

    The repository is created if it does not exist; ``private`` has no effect on an existing repository.
    Raises UserError with the Hub's message.
    """
    api = HfApi(token=token)
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Upload {folder.name}")
    # versions of huggingface_hub differ in the HTTP client whose errors they raise
    except Exception as error:
        reason = " ".join(censored(f"{type(error).__name__}: {error}").split())
        raise UserError(
            f"--push={name}: {reason}; the exported model is in {folder}, and the same command with --force "
            "tries again"
        ) from error
    return str(address)
