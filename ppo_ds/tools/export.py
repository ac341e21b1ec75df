"""Exports a checkpoint as a Hugging Face folder, in one process on the CPU, even while its run is training.

Only the model sections of the run's config are used; its data, rewards and other code are not loaded. Memory
holds one copy of the model, or with adapters two copies, because merging does not overwrite the base weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ppo_ds.assemble.data import build_tokenizer
from ppo_ds.config.registry import STAGES, import_target
from ppo_ds.config.schema import TextConfig, trained_models
from ppo_ds.engine.checkpoint.checkpoints import damage_of, read_state, step_folders, step_of
from ppo_ds.engine.checkpoint.reading import read_weights
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.storage.drafts import draft_directory, remove_drafts
from ppo_ds.storage.reading import is_below, read_text
from ppo_ds.tools.model_card import remove_local_base, write_card
from ppo_ds.tools.settings import config_of_settings

# folder names of the export at the end of a run
FOLDERS = {"actor": "model", "scorer": "model", "critic": "critic", "ema": "model_ema"}
# a draft without a new file for this many seconds belongs to an export that was killed
LEFTOVER_SECONDS = 6 * 3600


def find_checkpoint(path: Path, step: int | None = None, best: bool = False) -> Path:
    """Returns ``path`` if it is a checkpoint, or else a checkpoint of the run directory ``path``.

    In a run directory, selects the checkpoint of ``step``, the best one, or by default the newest.
    """
    if not os.path.isdir(path):
        raise UserError(f"{path}: no such folder; give a run directory, or one of its checkpoints")
    path = path.resolve()
    if (path / "state.json").exists() or (path / "manifest.json").exists():
        if best or step is not None:
            raise UserError(f"{path}: is a single checkpoint; --best and --step need a run directory")
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = sorted(map(step_of, step_folders(root)))
    if not steps:
        raise UserError(f"{path}: contains no checkpoint")
    available = f"available steps: {', '.join(map(str, steps))}"
    if best:
        if not (root / "best").is_file():
            reason = "checkpoint.keep_best=false, or no evaluation yet"
            raise UserError(f"--best: {root} has no best checkpoint ({reason}); {available}")
        name = read_text(root / "best").strip()
        step = next((step for step in steps if name == f"step_{step:06d}"), -1)
    if step is not None and step not in steps:
        option = "--best" if best else f"--step={step}"
        raise UserError(f"{option}: no such checkpoint in {root}; {available}")
    found = root / f"step_{steps[-1] if step is None else step:06d}"
    if not is_below(found, path):
        raise UserError(f"{found}: is a link to a folder elsewhere; give that folder instead of {path}")
    return found


def main_model(checkpoint: Path) -> str:
    """Returns the main model of the checkpoint's stage: scorer for stage=reward_model, otherwise actor."""
    return "scorer" if (checkpoint / "scorer").is_dir() else "actor"


def export(
    checkpoint: Path,
    role: str,
    out: Path | None = None,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
    name: str | None = None,
    adapter: bool = False,
) -> Path:
    """Writes the model ``role``, a key of FOLDERS, to ``out``, and any adapter of the actor to out/adapter.

    Each of the two folders gets a model card. Returns the model's folder; if an error is raised, it is
    neither created nor changed. ``force`` replaces an existing model folder. ``name`` is the model's name on
    the Hub, for the card. ``adapter`` raises UserError if there is no adapter, but changes nothing else.
    """
    out = target_folder(checkpoint, role, out, force)
    config = read_config(checkpoint, role, trust_remote_code)
    tokenizer, module = initial_model(config, role, checkpoint)
    model, copy = (main_model(checkpoint), "ema") if role == "ema" else (role, None)
    # stage=reward_model stores the settings for its export, which depend on its data
    exports = read_state(checkpoint)["state"].get("export", {}) if model == "scorer" else {}
    saved = exports.get("ema" if role == "ema" else "model", {})
    try:
        read_weights(module, checkpoint, model, weight_copy=copy)
    except FileNotFoundError as error:
        raise UserError(f"{checkpoint}: the run deleted it while it was read; export a newer one") from error
    except (OSError, TypeError, LookupError, ArithmeticError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{checkpoint}: has damaged weights: {' '.join(str(error).split())}") from error
    try:
        remove_drafts(out.parent, name=out.name, older_than=LEFTOVER_SECONDS)
        with draft_directory(out) as draft:
            module.save(draft, **saved)
            (tokenizer.with_padding(saved["pad_id"]) if saved else tokenizer).save(draft)
            if role == "actor":
                module.save_adapter(draft / "adapter", module.lm.state_dict())
            if adapter and not (draft / "adapter").is_dir():
                raise UserError(f"--adapter: the {role} of {checkpoint} has no LoRA adapter; remove it")
            if name and (draft / "adapter").is_dir():
                remove_local_base(draft / "adapter")
            write_card(draft, checkpoint, config, role, name)
            if (draft / "adapter").is_dir():
                tokenizer.save(draft / "adapter")
                write_card(draft / "adapter", checkpoint, config, "adapter", name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out}: cannot be written: {error}") from error
    return out


def target_folder(checkpoint: Path, role: str, out: Path | None, force: bool) -> Path:
    """Returns the folder to write: ``out``, or if it is None, a folder below ``exports`` of the run.

    Raises UserError if the folder exists, unless it is a model folder and ``force`` is set. Without ``out``,
    also raises UserError if ``exports`` or a part of the path below it is a link.
    """
    if out is None:
        out = checkpoint.parent.parent / "exports" / checkpoint.name / FOLDERS[role]
        for path in (out.parent.parent, out.parent, out):
            if path.is_symlink():
                raise UserError(f"{path}: is a symbolic link to {os.readlink(path)}; remove it, or give OUT")
    out = out.resolve()
    if os.path.exists(out) and not force:
        raise UserError(f"{out}: exists; choose another folder, or replace it with --force")
    if os.path.exists(out) and not (out / "config.json").is_file():
        raise UserError(f"{out}: exists and is not a model folder, which --force does not replace")
    return out


def read_config(checkpoint: Path, role: str, trust_remote_code: bool) -> TextConfig:
    """Returns the config of the checkpoint's run.

    Raises UserError if a file of the checkpoint is damaged or is a link to a file elsewhere, if the
    checkpoint has no weights of ``role``, or if its settings are invalid.
    """
    if damage := damage_of(checkpoint):
        raise UserError(
            f"{checkpoint}: is damaged, or was deleted by its run: {'; '.join(damage[:3])}; "
            "choose another one with --step"
        )
    state = read_state(checkpoint)
    held = [*state["models"], *state["shadows"]]
    if role not in held:
        roles = ", ".join(name for name in held if name in FOLDERS)
        raise UserError(f"--role={role}: {checkpoint} has no such weights; it holds {roles}")
    settings: Any = state.get("settings")
    # the run directory may have been moved since the checkpoint was written
    try:
        settings = moved_paths(settings, f"{settings['run']['dir']}/", f"{checkpoint.parent.parent}/")
    except (LookupError, TypeError) as error:
        raise UserError(f"{checkpoint}: its settings have no run.dir; export another checkpoint") from error
    file = checkpoint / "state.json"
    return config_of_settings(settings, file, trust_remote_code=trust_remote_code, kind=TextConfig)


def moved_paths(value: Any, old: str, new: str) -> Any:
    """Returns a copy of a nested dict in which the prefix ``old`` of paths is replaced by ``new``.

    run.resume=restart moves a run to ``earlier_N/`` in its directory, but may leave the files of `prepare` in
    the directory itself. If ``new`` is an ``earlier_N/`` that lacks a file, the file's path therefore begins
    with the parent of ``new``.
    """
    if isinstance(value, dict):
        return {name: moved_paths(item, old, new) for name, item in value.items()}
    if not isinstance(value, str) or not value.startswith(old):
        return value
    moved, stayed = (Path(folder, value.removeprefix(old)) for folder in (new, Path(new).parent))
    return str(stayed if Path(new).name.startswith("earlier_") and not moved.exists() else moved)


def initial_model(config: TextConfig, role: str, checkpoint: Path) -> tuple[Tokenizer, Any]:
    """Builds the tokenizer and the module of ``role`` in the same way as the run."""
    try:
        name = next(iter(trained_models(config)))
        tokenizer = build_tokenizer(config, name)
        load = import_target(STAGES[config.stage].initial_model or "")
        return tokenizer, load(config, name if role == "ema" else role, tokenizer)
    except UserError as error:
        raise UserError(*(f"{checkpoint}: {line}" for line in error.problems)) from error
