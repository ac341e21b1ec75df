"""Downloads the files of Hub models, once for all ranks of a node, and prints the size of the weights.

A rank that loads a model requests a dozen files from the Hub, which rejects many requests from one address
(HTTP 429). Before the models of a run are loaded, rank 0 therefore lists their files, and the first rank of
each node downloads files that its cache lacks. All ranks then load only from the cache, and only the commit
that rank 0 has found. If nodes share a cache, rank 0 fills it. Some tools load a model without this download.
``fetch_weights`` then downloads the weights, and transformers downloads the other files.

The progress bars of the libraries are off (launch/train.py), since every rank would draw one. Instead, rank 0
shows the download of weights (``DownloadBar``).
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError
from tqdm import tqdm
from transformers.dynamic_module_utils import get_cached_module_file

from ppo_ds.config.similar_paths import did_you_mean_model
from ppo_ds.errors import UserError

if TYPE_CHECKING:
    from ppo_ds.distributed.world import World

# the files that transformers loads: model.safetensors, pytorch_model-00001-of-00002.bin, ...
_WEIGHTS = re.compile(r"(?:pytorch_)?model(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
# Tokenizers have files of many names. Therefore all files are downloaded except for weights in other formats
# and for pages about the model.
_UNUSED = re.compile(
    r".*\.(?:safetensors|bin|h5|msgpack|ot|gguf|onnx|onnx_data|pt|pth|ckpt|npz|tflite|md|png|jpe?g|gif|pdf)"
)
# transformers requests this file from the Hub even with local_files_only, unless the cache records that the
# file does not exist
_ADAPTER = "adapter_config.json"
_TEMPLATES = "additional_chat_templates/"
UNREACHABLE = (
    "no folder of that name, not in the local Hub cache, and the Hub cannot be reached; "
    "give a local folder or download the model first"
)


@dataclass(frozen=True)
class HubModel:
    """A model that the config specifies by Hub id."""

    key: str  # the config key of the path, for messages
    path: str
    revision: str | None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class HubFiles:
    """The files of one commit of a Hub model; both tuples are empty if the Hub did not list the files."""

    model: HubModel
    commit: str
    small: tuple[str, ...] = ()  # config, tokenizer, code, ...
    weights: tuple[tuple[str, int], ...] = ()  # name and size in bytes

    def missing(self, names: Sequence[str]) -> list[str]:
        """Returns those of ``names`` that the local cache lacks."""
        return [
            name
            for name in names
            if not isinstance(try_to_load_from_cache(self.model.path, name, revision=self.commit), str)
        ]


class DownloadBar(tqdm):
    """Shows the progress of one file by a bar on a terminal, else by a line every 10 % or 30 seconds."""

    LINE_PARTS, LINE_SECONDS = 10, 30.0

    def __init__(self, *args: Any, **kwargs: Any):
        self._lines = not sys.stderr.isatty()
        self._last_part, self._last_line = 0, time.monotonic()
        file = io.StringIO() if self._lines else None  # tqdm itself then writes to nowhere
        super().__init__(*args, **kwargs, mininterval=0.5, file=file)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if not self._lines:
            super().display(msg, pos)
            return
        part = int(self.LINE_PARTS * self.n / self.total) if self.total else 0
        now = time.monotonic()
        if part > self._last_part or now - self._last_line >= self.LINE_SECONDS:
            self._last_part, self._last_line = part, now
            whole = f" of {self.total / 1e9:.2f}" if self.total else ""
            share = f", {self.n / self.total:.0%}" if self.total else ""
            line = f"download   {self.desc}: {self.n / 1e9:.2f}{whole} GB{share}"
            print(line, file=sys.stderr, flush=True)


# The models that this process loads only from the cache, by path and revision.
_downloaded: dict[tuple[str, str | None], HubFiles] = {}


def hub_arguments(path: str, revision: str | None) -> dict[str, Any]:
    """Returns the arguments of ``from_pretrained`` that select a Hub model's revision; {} for a local folder.

    If ``download_files`` has recorded a commit of the model, they select this commit and prevent requests to
    the Hub.
    """
    if os.path.isdir(path):
        return {}
    files = _downloaded.get((path, revision))
    if files is not None:
        return {"revision": files.commit, "local_files_only": True}
    return {} if revision is None else {"revision": revision}


def cached_folder(path: str, revision: str | None) -> Path | None:
    """Returns the folder with a model's files: the local folder ``path``, or a folder in the Hub cache.

    Returns None for a Hub model that ``download_files`` has not downloaded.
    """
    if os.path.isdir(path):
        return Path(path)
    files = _downloaded.get((path, revision))
    cached = try_to_load_from_cache(path, "config.json", revision=files.commit) if files else None
    return Path(cached).parent if isinstance(cached, str) else None


def download_files(models: Sequence[HubModel], world: World) -> None:
    """Downloads all files of the models except for their weights. All ranks must call this.

    Afterwards, this process loads these models without requests to the Hub. The exceptions are models whose
    files the Hub does not list and whose weights are not cached (``list_files`` returns None). Local folders,
    and paths that are not Hub ids, are ignored. Raises UserError if a model is neither in the cache nor on
    the Hub.
    """
    unique: dict[tuple[str, str | None], HubModel] = {}
    for model in models:
        key = model.path, model.revision
        if is_hub_id(model.path) and (key not in unique or model.trust_remote_code):
            unique[key] = model
    listed = world.on_all(lambda: [list_files(model) for model in unique.values()] if world.is_main else [])
    found = [files for files in world.gather_objects(listed)[0] if files is not None]

    def fetch() -> None:
        for files in found:
            download(files, files.small)

    world.on_first_of_node(fetch)
    _downloaded.update({(files.model.path, files.model.revision): files for files in found})


def download_weights(models: Sequence[HubModel], world: World) -> None:
    """Downloads the weights of models for which ``download_files`` was called. All ranks must call this."""
    keys = dict.fromkeys((model.path, model.revision) for model in models)
    wanted = [_downloaded[key] for key in keys if key in _downloaded]

    def fetch() -> None:
        for files in wanted:
            names = [name for name, _ in files.weights]
            missing = files.missing(names)
            if missing and world.is_main:
                announce(files.model, sum(size for name, size in files.weights if name in missing))
            download(files, missing, bar=DownloadBar if world.is_main else None)

    # rank 0 first: if nodes share a cache, the other ranks then find the files there
    world.on_all(fetch if world.is_main else lambda: None)
    world.on_first_of_node(fetch)


def is_hub_id(path: str) -> bool:
    """Returns whether a path has the form of a Hub id and is not a local folder."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not os.path.exists(path)


def list_files(model: HubModel) -> HubFiles | None:
    """Lists the files of a model on the Hub and downloads the small ones, such as its config and tokenizer.

    If the Hub does not list the files, the result depends on the cache. If weights are cached, returns
    HubFiles without names, so that the cache is used unchanged. If only other files are cached, returns None,
    so that transformers requests each file; some mirrors of the Hub provide files without listing them.
    Raises UserError if not even config.json is cached.
    """
    try:
        # writes the revision's commit into the cache, for later launches without a network
        config = hf_hub_download(model.path, "config.json", revision=model.revision)
        commit = Path(config).parent.name
        info = HfApi().model_info(model.path, revision=commit, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    except (OSError, ValueError) as error:
        cached = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
        if not isinstance(cached, str):
            meant = did_you_mean_model(model.path)
            raise UserError(f"{model.key}={model.path}: {reason(error)}{meant}") from error
        folder = Path(cached).parent
        return HubFiles(model, folder.name) if any(map(_WEIGHTS.fullmatch, os.listdir(folder))) else None
    weights = [name for name in sizes if _WEIGHTS.fullmatch(name)]
    # transformers reads safetensors where a repository has both
    weights = [name for name in weights if name.endswith(".safetensors")] or weights
    small = tuple(
        name
        for name in sizes
        if not _UNUSED.fullmatch(name)
        and (model.trust_remote_code or not name.endswith(".py"))
        and ("/" not in name or name.startswith(_TEMPLATES) or name.endswith(".py"))
    )
    files = HubFiles(model, commit, small, tuple((name, sizes[name]) for name in weights))
    download(files, small)
    return files


def download(files: HubFiles, names: Sequence[str], bar: type[tqdm] | None = None) -> None:
    """Downloads those of ``names`` that the local cache lacks; raises UserError if one cannot be downloaded.

    Also copies the model's code to the folder from which transformers imports code. If several ranks download
    to one cache, they must call this through ``World.on_first_of_node``, so that no rank imports a file that
    another rank is still writing.
    """
    if not names:
        return
    model = files.model
    looked_up = try_to_load_from_cache(model.path, _ADAPTER, revision=files.commit)
    if _ADAPTER not in files.small and looked_up is None:
        with suppress(OSError):  # records in the cache that the commit has no such file
            hf_hub_download(model.path, _ADAPTER, revision=files.commit)
    for name in files.missing(names):
        try:
            hf_hub_download(model.path, name, revision=files.commit, tqdm_class=bar)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{model.key}={model.path}: {name} cannot be downloaded: {reason(error)}"
            ) from error
    for name in names:
        if name.endswith(".py"):
            with suppress(OSError, ImportError):  # a missing package is reported if the code is loaded
                get_cached_module_file(model.path, name, revision=files.commit, local_files_only=True)


def reason(error: Exception) -> str:
    """Returns in one line why a file of the Hub is not available."""
    if isinstance(error, LocalEntryNotFoundError):  # huggingface_hub raises it for failed connections
        return UNREACHABLE
    return " ".join(str(error).split())[:400]


def announce(model: HubModel, size: int) -> None:
    """Prints the model, the size and the folder of a download."""
    line = f"download   {model.key}={model.path}: {size / 1e9:.2f} GB to {constants.HF_HUB_CACHE}"
    print(line, file=sys.stderr, flush=True)


def fetch_weights(path: str, revision: str | None, key: str) -> None:
    """Downloads the weights of a Hub model that are not in the local cache yet.

    Only the first rank of each node downloads. When other ranks load these files, they wait until the files
    are complete. Does nothing for a local folder, and after ``download_files``. If the Hub cannot be reached
    or does not have the model, loading the model raises the error later.
    """
    if os.path.isdir(path) or (path, revision) in _downloaded or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    patterns = ["*.safetensors", "*.bin"]
    with suppress(OSError, ValueError):
        files = snapshot_download(path, revision=revision, allow_patterns=patterns, dry_run=True)
        files = [file for file in files if _WEIGHTS.fullmatch(file.filename)]
        # transformers reads safetensors where a repository has both
        safe = [file for file in files if file.filename.endswith(".safetensors")]
        missing = [file for file in safe or files if file.will_download]
        if missing:
            announce(HubModel(key, path, revision), sum(file.file_size or 0 for file in missing))
        for file in missing:
            hf_hub_download(path, file.filename, revision=file.commit_hash, tqdm_class=DownloadBar)
