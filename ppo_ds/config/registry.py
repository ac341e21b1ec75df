"""Lists the stages, with their requirements and the location of their code.

The table imports neither torch nor the listed code, so a config is checked before anything is loaded. The
config checks, `--help` and docs/config.md use the table; a stage is imported when a run is built. Other parts
that a config chooses by name are in the modules `keys.py` of their packages.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A selectable part: the dotted name of its code, and its description."""

    target: str  # package.module.name
    description: str


@dataclass(frozen=True)
class StageEntry(Entry):
    """A kind of training: ``target`` (config, RunContext) builds it, and its Config class is in schema.py."""

    # Dotted name of a function (config, ranks) that returns the config of a dry run: two steps with tiny
    # random models. None: run.dry_run is refused.
    dry_run: str | None = field(default=None, kw_only=True)

    # Dotted name of a function (config, name, tokenizer) that loads the trained model ``name``, such as
    # actor, in the state before the first step. None: launch/export.py refuses checkpoints of the stage.
    initial_model: str | None = field(default=None, kw_only=True)

    # Dotted name of a function (config, World, prepared=...) that raises UserError for mistakes in data and
    # rewards. It loads no weights. ``prepared`` is False if `prepare` has yet to create files.
    check: str | None = field(default=None, kw_only=True)

    # NAME -> evaluation metric, which summary.json stores as heldout_NAME_before and heldout_NAME_after.
    heldout: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    # Evaluation metrics valid for checkpoint.best_by, its default first; * matches any text. Metrics
    # that depend on other keys are added in checks/evaluation.py.
    eval_metrics: tuple[str, ...] = field(default=("eval/score_mean",), kw_only=True)


STAGES = {
    "ppo": StageEntry(
        "ppo_ds.assemble.ppo.build_ppo",
        "PPO, GRPO and other policy gradient methods: generate, score, update.",
        dry_run="ppo_ds.assemble.dry_run.dry_run_config",
        initial_model="ppo_ds.assemble.roles.ppo_model",
        check="ppo_ds.assemble.preflight.check_inputs",
        heldout={
            "accuracy": "eval/accuracy",
            "score_mean": "eval/score_mean",
            "win_rate_vs_ref": "eval/win_rate_vs_ref",
        },
        eval_metrics=("eval/score_mean", "eval/score_std", "eval/resp_len_mean", "eval/stop_frac"),
    ),
    "sft": StageEntry(
        "ppo_ds.assemble.sft.build_sft",
        "Supervised fine-tuning of the actor on demonstrations.",
        dry_run="ppo_ds.assemble.dry_run.sft_dry_run_config",
        initial_model="ppo_ds.assemble.roles.sft_model",
        check="ppo_ds.assemble.sft.check_demonstrations",
        heldout={"loss": "eval/loss", "token_accuracy": "eval/token_accuracy"},
        eval_metrics=("eval/loss", "eval/perplexity", "eval/token_accuracy"),
    ),
    "reward_model": StageEntry(
        "ppo_ds.assemble.reward_model.build_reward_model",
        "Training of a reward model on preference pairs.",
        dry_run="ppo_ds.assemble.dry_run.reward_model_dry_run_config",
        initial_model="ppo_ds.assemble.reward_model.scorer_module",
        check="ppo_ds.assemble.reward_model.check_preferences",
        heldout={"pair_accuracy": "eval/accuracy", "loss": "eval/loss"},
        eval_metrics=(
            "eval/accuracy",
            "eval/accuracy/*",  # of the subsets of the data
            "eval/loss",
            "eval/ties",
            "eval/score_mean",
            "eval/score_std",
            "eval/margin_*",
            "eval/calibration_error",
            "eval/length_corr",
        ),
    ),
}


def import_target(path: str) -> Any:
    """Imports ``package.module.name``. Raises ImportError or AttributeError if it does not exist.

    The current folder is added to the end of sys.path, since launchers add only the folder of their script.
    """
    module, _, name = path.rpartition(".")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    return getattr(importlib.import_module(module), name)


def where_import_failed(error: BaseException) -> str:
    """Returns " (FILE:LINE)" of the last line of user code before an import failed, or ""."""
    package, stdlib = str(Path(__file__).parents[1]) + os.sep, sysconfig.get_path("stdlib") + os.sep
    others = (package, stdlib, "<frozen", sysconfig.get_path("purelib") + os.sep)
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if not frame.filename.startswith(others)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
