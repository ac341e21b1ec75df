"""Downloads the weights of Hub models, and prints their size and a progress bar.

The progress bars of the libraries are off (launch/train.py), since every rank would draw its own.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from huggingface_hub import constants, hf_hub_download, snapshot_download
from tqdm import tqdm

# the files that transformers loads: model.safetensors, pytorch_model-00001-of-00002.bin, ...
_WEIGHTS = re.compile(r"(?:pytorch_)?model(?:-\d+-of-\d+)?\.(?:safetensors|bin)")


class DownloadBar(tqdm):
    """Progress bar of one file. Redirected output gets a line per minute instead of several per second."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs, mininterval=0.5 if sys.stderr.isatty() else 60.0)


def fetch_weights(path: str, revision: str | None, key: str) -> None:
    """Downloads the weights of a Hub model that are not in the local cache yet.

    Only the first rank of each node does this. When the other ranks load the same files, they wait until the
    files are complete. Does nothing for a local folder. If the Hub cannot be reached or has no such model,
    the error is raised later, when the model is loaded.
    """
    if os.path.isdir(path) or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    patterns = ["*.safetensors", "*.bin"]
    try:
        files = snapshot_download(path, revision=revision, allow_patterns=patterns, dry_run=True)
        files = [file for file in files if _WEIGHTS.fullmatch(file.filename)]
        # transformers reads safetensors where a repository has both
        safe = [file for file in files if file.filename.endswith(".safetensors")]
        missing = [file for file in safe or files if file.will_download]
        if not missing:
            return
        size = sum(file.file_size or 0 for file in missing)
        line = f"download   {key}={path}: {size / 1e9:.2f} GB to {constants.HF_HUB_CACHE}"
        print(line, file=sys.stderr, flush=True)
        for file in missing:
            hf_hub_download(path, file.filename, revision=file.commit_hash, tqdm_class=DownloadBar)
    except (OSError, ValueError):
        return
