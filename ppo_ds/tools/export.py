"""A checkpoint to a Hugging Face folder, in one process on a CPU: the model of step 400 of a run that still trains, or that died.

Of the run's config only the models are looked at, and nothing of its data, rewards and other code is loaded. In memory is one copy of the model;
with adapters two, since the merged weights are made beside those of the base.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ppo_ds.build.data import build_tokenizer
from ppo_ds.build.roles import actor_module, critic_module, critic_start
from ppo_ds.config.renamed import with_current_names
from ppo_ds.config.schema import Config, from_tree, inherit, reward_models
from ppo_ds.engine.checkpoint.checkpoints import damage_of
from ppo_ds.engine.checkpoint.reading import read_weights
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer

FOLDERS = {
    "actor": "model",
    "critic": "critic",
    "ema": "model_ema",
}  # how a run calls what it exports at its end


def find_checkpoint(path: Path, step: int | None = None, best: bool = False) -> Path:
    """``path`` itself, or of a run directory the newest checkpoint, the best one, or that of ``step``."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a run directory, or one of its checkpoints")
    path = path.resolve()
    if (path / "state.json").exists() or (path / "manifest.json").exists():
        if best or step is not None:
            raise UserError(
                f"{path}: is one checkpoint; --best and --step choose among those of a run directory"
            )
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = sorted(
        int(folder.name.removeprefix("step_"))
        for folder in root.glob("step_*")
        if folder.name.removeprefix("step_").isdigit()
    )
    if not steps:
        raise UserError(f"{path}: no checkpoint in it")
    there = f"there are: {', '.join(map(str, steps))}"
    if best:
        if not (root / "best").is_file():
            raise UserError(
                f"--best: {root} has no best one (checkpoint.keep_best=false, or no evaluation yet); {there}"
            )
        name = (root / "best").read_text(encoding="utf-8").strip()
        step = next((step for step in steps if name == f"step_{step:06d}"), -1)
    if step is not None and step not in steps:
        raise UserError(f"{'--best' if best else f'--step={step}'}: no such checkpoint in {root}; {there}")
    return root / f"step_{steps[-1] if step is None else step:06d}"


def export(
    checkpoint: Path,
    role: str,
    out: Path | None = None,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write ``role`` (of FOLDERS) to ``out``, the adapter to ``out/adapter``; returns the folder. It is there complete, or not at all."""
    out = (out or checkpoint.parent.parent / "exports" / checkpoint.name / FOLDERS[role]).resolve()
    _expect_free(out, force)
    config = _config(checkpoint, role)
    if not trust_remote_code:
        _refuse_remote_code(config, checkpoint)
    tokenizer, module = _as_begun(config, role, checkpoint)
    try:
        read_weights(
            module,
            checkpoint,
            "critic" if role == "critic" else "actor",
            shadow="ema" if role == "ema" else None,
        )
    except FileNotFoundError as error:
        raise UserError(f"{checkpoint}: was pruned by its run while it was read; take a newer one") from error
    aside = out.with_name(f".tmp_{out.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of an export that was killed
        module.save(aside)
        tokenizer.save(aside)
        if role == "actor":
            module.save_adapter(aside / "adapter", module.lm.state_dict())
        if out.exists():
            shutil.rmtree(out)
        aside.rename(out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(f"{out}: cannot be written: {error}") from error
    return out


def _expect_free(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not force:
        raise UserError(f"{out}: exists; name another folder, or --force replaces it")
    if not (out / "config.json").is_file():
        raise UserError(
            f"{out}: exists and is no model folder (no config.json in it), and --force replaces no other"
        )


def _config(checkpoint: Path, role: str) -> Config:
    """The settings that it was made with, once all of its files are found to be sound and ``role`` among them."""
    damage = damage_of(checkpoint)
    if damage:
        raise UserError(
            f"{checkpoint}: is damaged, or was pruned meanwhile: {'; '.join(damage[:3])}; take another one with --step"
        )
    about = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    held = [*about["models"], *about["shadows"]]
    if role not in held:
        raise UserError(
            f"--role={role}: {checkpoint} has no such weights; it holds {', '.join(name for name in held if name in FOLDERS)}"
        )
    settings = about.get("settings")
    if settings is None:
        raise UserError(
            f"{checkpoint}: an older version made it and kept no settings in it; resume the run, and export its next checkpoint"
        )
    here = _here(settings, f"{settings['run']['dir']}/", f"{checkpoint.parent.parent}/")
    config, wrong = from_tree(with_current_names(here))
    if wrong:
        raise UserError(*(f"{checkpoint / 'state.json'}: {line}" for line in wrong.values()))
    return inherit(config)


def _here(value: Any, before: str, now: str) -> Any:
    """Paths below the run directory, in ``value`` and in all that it holds, as it is called today: it may have been moved."""
    if isinstance(value, dict):
        return {name: _here(item, before, now) for name, item in value.items()}
    return now + value.removeprefix(before) if isinstance(value, str) and value.startswith(before) else value


def _refuse_remote_code(config: Config, checkpoint: Path) -> None:
    """The settings came with the checkpoint, which may be somebody else's: the trust that stands there is not that of who exports."""
    for key in (name for name, model in _models(config) if model.get("trust_remote_code")):
        raise UserError(
            f"{checkpoint}: {key}.trust_remote_code=true runs Python code of {key}.path; read it, then repeat with --trust-remote-code"
        )


def _models(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "actor.model", asdict(config.actor.model)
    yield "critic.model", asdict(config.critic.model)
    yield from reward_models(config.reward)


def _as_begun(config: Config, role: str, checkpoint: Path) -> tuple[Tokenizer, Any]:
    """The tokenizer, and the module as its engine was given it."""
    try:
        tokenizer = build_tokenizer(config)
        return tokenizer, critic_module(
            config, critic_start(config, tokenizer)
        ) if role == "critic" else actor_module(config)
    except UserError as error:
        raise UserError(*(f"{checkpoint}: {line}" for line in error.problems)) from error
