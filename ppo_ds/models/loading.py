"""Loads models from a folder or the Hub: no dropout, no missing weights, errors
that a user can act on.

Works under ZeRO-3 too (inside ``policy.sharded_loading``): nothing here reads or writes a weight.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ppo_ds.errors import UserError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NOT_REACHED = "couldn't connect"  # transformers', where there is no network
UNREACHABLE = "no folder of that name, not in the local Hub cache, and the Hub cannot be reached; give a local folder or download the model first"
_DROPOUT = re.compile(
    r"dropout|pdrop|layerdrop"
)  # attention_dropout, resid_pdrop, encoder_layerdrop, classifier_dropout_prob, ...


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of bf16, fp16 or fp32."""
    if name not in _DTYPES:
        raise UserError(f"model.dtype={name!r}: must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_config(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, key: str = "model.path"
) -> PreTrainedConfig:
    """The Hugging Face config of a local folder or Hub id, with every dropout at 0.

    ``key`` names ``path`` in error messages.
    """
    path = _checked(path, key)
    with user_errors(path, key, Exception):
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, **_hub_only(path, revision)
        )
    _remove_dropout(config)
    config._attn_implementation = (
        None  # what computes the attention the run says: a folder may name code on the Hub here
    )
    return config


def from_pretrained(
    auto_class: Any,
    path: str,
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
    key: str = "model.path",
) -> tuple[nn.Module, dict[str, Any]]:
    """The model and transformers' loading info (missing_keys, mismatched_keys, ...).

    What may be missing is the caller's rule: see refuse_missing.
    """
    path = _checked(path, key)
    with user_errors(path, key):
        return auto_class.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            # None is transformers' own "sdpa, or eager where the family has no sdpa" (DeBERTa); naming sdpa
            # is an error there
            attn_implementation=None if attn_implementation == "sdpa" else attn_implementation,
            ignore_mismatched_sizes=True,  # reported by refuse_missing, with names and shapes
            output_loading_info=True,
            **_hub_only(path, revision),
        )


def weight_names(path: str, revision: str | None = None) -> set[str] | None:
    """The names of the weights in a model's safetensors files, as far as these are on this machine.

    None: not to be told without a download.
    """
    for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME):
        try:
            file = cached_file(path, name, local_files_only=True, **_hub_only(path, revision))
            if name == SAFE_WEIGHTS_INDEX_NAME:
                return set(json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"])
            with safe_open(file, framework="pt") as weights:
                return set(weights.keys())
        except (
            OSError,
            ValueError,
            KeyError,
            SafetensorError,
        ):  # not there; what is damaged is named by whoever loads it
            continue
    return None


def refuse_missing(
    path: str, info: dict[str, Any], *, allowed: Sequence[str] = (), key: str = "model.path"
) -> None:
    """UserError if a weight outside ``allowed`` was not in the files (transformers fills it with random
    numbers) or had another shape.
    """
    missing = sorted(set(info["missing_keys"]) - set(allowed))
    if missing:
        raise UserError(
            f"{key}={path}: weights missing from its files would start at random ({_some(missing)}); give a complete model"
        )
    mismatched = [
        f"{name} is {list(there)}, not {list(here)}" for name, there, here in sorted(info["mismatched_keys"])
    ]
    if mismatched:
        raise UserError(f"{key}={path}: its files do not fit its config.json: {_some(mismatched)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _remove_dropout(config: PreTrainedConfig) -> None:
    """Old log-probs, ratios and values are compared between forwards: any dropout is noise in them."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):  # text_config, attn_config, ...
            _remove_dropout(value)
        elif _DROPOUT.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, name, type(value)(0))  # some fields take ints alone


def _checked(path: str, key: str) -> str:
    """The path with ~ resolved.

    What can only be a local folder must be one; anything else may be a Hub id.
    """
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise UserError(f"{key}={path}: is a file; give the folder with config.json and the weights")
    if path.startswith((".", os.sep)) or path.count("/") != 1:
        raise UserError(f"{key}={path}: no such folder, and a Hub id has the form owner/name")
    return path


def _hub_only(path: str, revision: str | None) -> dict[str, str]:
    """Arguments that mean nothing for a local folder."""
    return {} if revision is None or os.path.isdir(path) else {"revision": revision}


@contextmanager
def user_errors(path: str, key: str, *more: type[Exception]) -> Iterator[None]:
    """transformers says OSError, ValueError or ImportError for most that is wrong with a folder, a Hub id or
    its code, and of a config.json that makes no sense anything: KeyError, AssertionError, ``more``.
    """
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{key}={path}: its weights are damaged ({error}); get the files anew") from error
    except (
        UnpicklingError,
        EOFError,
        IndexError,
    ) as error:  # of torch.load(weights_only=True), which runs nothing
        raise UserError(
            f"{key}={path}: {_pickled(path)} is damaged, or holds more than tensors, and could run code when it is read (none was run); "
            "get the model with weights in .safetensors files"
        ) from error
    except (OSError, ValueError, ImportError, AssertionError, KeyError, ZeroDivisionError, *more) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{key}={path}: {_explained(reason, path, key)}") from error


def _pickled(path: str) -> str:
    """The weights that are not safetensors."""
    return " or ".join(sorted(file.name for file in Path(path).glob("*.bin"))[:3]) or "its pytorch_model.bin"


def _explained(reason: str, path: str, key: str) -> str:
    if "trust_remote_code" in reason:
        switch = key.removesuffix("path") + "trust_remote_code"
        return f"needs Python code from its own files; read that code, then set {switch}=true"
    if NOT_REACHED in reason:
        return UNREACHABLE
    return " ".join(reason.split())[:400]
