"""Checks the evaluation: its rewards, and the metric that selects the best checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from ppo_ds.config.registry import STAGES
from ppo_ds.config.schema import Config, PPOConfig, TextConfig, best_metric
from ppo_ds.config.signatures import misused_targets
from ppo_ds.config.text import did_you_mean, show

TAKEN = ("score", "resp_len")  # eval/score_mean and eval/resp_len_mean are other metrics


def check_best_checkpoint(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line if no evaluation can select the best checkpoint that the config asks for."""
    checkpoint, patience = config.checkpoint, config.eval.patience
    wanted = "eval.every and data.eval_path" if isinstance(config, TextConfig) else "eval.every"
    if patience is not None and not config.eval.every:
        yield f"eval.patience={patience}: counts evaluations without improvement; set {wanted}"
    elif checkpoint.keep_best and not config.eval.every:
        yield f"checkpoint.keep_best=true: the best checkpoint is chosen by evaluation; set {wanted}"
    if checkpoint.best_by is None:
        return
    metrics = eval_metrics(config)
    if not any(fnmatchcase(best_metric(config), metric) for metric in metrics):
        yield (
            f"checkpoint.best_by={show(checkpoint.best_by)}: the evaluations of this run do not measure it; "
            f"use one of {', '.join(metrics)}{did_you_mean(checkpoint.best_by, metrics)}"
        )


def eval_metrics(config: Config) -> list[str]:
    """Returns the metrics of a run's evaluations, in which * stands for any text."""
    metrics = list(STAGES[config.stage].eval_metrics)
    if not isinstance(config, PPOConfig):
        return metrics
    metrics += ["eval/win_rate_vs_ref"] if config.eval.win_rate else []
    metrics += ["eval/accuracy"] if config.eval.correct_above is not None else []
    return metrics + [f"eval/{name}_mean" for name in config.eval.rewards]


def check_eval_rewards(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each evaluation reward with an unusable name or arguments.

    Also yields one if eval.by or eval.rewards is set without data.eval_path.
    """
    for name, section in config.eval.rewards.items():
        key = f"eval.rewards.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in TAKEN:
            yield (
                f"{key}: must be a name of letters, digits, _ and - other than {' and '.join(TAKEN)}, since "
                "it names the metric eval/<name>_mean"
            )
        if not section.get("_target_"):
            yield f"{key}._target_ is missing: add the reward as +reward@{key}=GROUP, such as length or model"
        yield from misused_targets(section, key)
    if config.eval.by and not config.data.eval_path:
        yield f"eval.by={config.eval.by}: needs held-out prompts; set data.eval_path"
    if config.eval.rewards and not config.data.eval_path:
        names = ",".join(config.eval.rewards)
        yield f"eval.rewards={show(names)}: score responses to held-out prompts; set data.eval_path"
