"""Writes the model card of an exported model: its origin, results, settings, and code that loads it."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from ppo_ds.config.checks.data import looks_local
from ppo_ds.config.schema import Config, PPOConfig, TextConfig, learning_rate, trained_models
from ppo_ds.config.text import show
from ppo_ds.engine.checkpoint.checkpoints import read_state
from ppo_ds.errors import printable
from ppo_ds.models.upload import NAME as HUB_NAME
from ppo_ds.storage.drafts import write_file
from ppo_ds.tracking.curves import plot_curves
from ppo_ds.tracking.jsonl import read_metrics
from ppo_ds.types import Metrics

CARD = "README.md"
CURVES = "curves.png"
STAGES = {"ppo": "PPO", "sft": "supervised fine-tuning", "reward_model": "training as a reward model"}
RUN_METRICS = (  # metrics of the exported step, with their descriptions
    ("reward/score_mean", "mean score of the sampled responses"),
    ("kl/ref_seq_mean", "KL to the reference model, in nats per response"),
    ("rollout/resp_len_mean", "mean length of the sampled responses, in tokens"),
)
SETTINGS = (  # the keys that a card shows if the stage has them and they are set
    *("algo.advantage.estimator", "algo.epochs", "algo.minibatch_size", "algo.gae.gamma", "algo.gae.lam"),
    *("algo.policy.loss", "algo.policy.clip_low", "algo.kl.place", "algo.kl.estimator", "algo.kl.coef"),
    *("actor.optim.lr", "actor.lora.rank", "critic.optim.lr", "scorer.optim.lr", "scorer.lora.rank"),
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "sft.batch_size", "reward_model.batch_size"),
    *("sampling.max_new_tokens", "sampling.temperature", "sampling.top_p", "run.seed"),
)
_CAUSAL_LM = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
"""
LOCAL_BASE = (
    "The base model was a local folder. To load the adapter, first set `base_model_name_or_path` in "
    "`adapter_config.json` to a path or name of the base model."
)
USE = {  # role -> code that loads the model; a critic is only for resuming a training
    "actor": _CAUSAL_LM,
    "ema": _CAUSAL_LM,
    "adapter": """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoPeftModelForCausalLM.from_pretrained("{name}")
""",
    "scorer": """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForSequenceClassification.from_pretrained("{name}")
""",
}


def write_card(folder: Path, checkpoint: Path, config: TextConfig, role: str, name: str | None) -> None:
    """Writes README.md and curves.png into an exported model folder.

    ``role`` is adapter, actor, ema, critic or scorer, and ``name`` the name on the Hub, if any. Only the last
    part of local paths is shown. The results are those of the checkpoint's step and of the last evaluation up
    to this step; the card of a critic has no results.
    """
    state = read_state(checkpoint)
    progress = state["state"].get("progress", {})
    before = progress.get("first_eval") or {}
    metrics_file = checkpoint.parent.parent / "metrics.jsonl"
    records = [record for record in read_metrics(metrics_file) if record["step"] <= state["step"]]
    title = (name or config.run.name or folder.name).rpartition("/")[2]
    drawn = plot_curves(metrics_file, folder / CURVES, title=title, before=before)
    base = config_value(config, f"{next(iter(trained_models(config)))}.model.path")
    data = shown(config.data.path, "datasets/") if config.data.path else "several data sets"
    reward = f", with the reward {reward_name(config)}" if isinstance(config, PPOConfig) else ""
    what = "The critic (value model) of " if role == "critic" else ""
    # the fields of https://github.com/huggingface/hub-docs/blob/main/modelcard.md
    front = {
        "base_model": on_hub(base),
        "datasets": on_hub(config.data.path),
        "library_name": "peft" if role == "adapter" else "transformers",
        "pipeline_tag": {"scorer": "text-classification", "critic": None}.get(role, "text-generation"),
        "tags": ["ppo_ds", "rlhf", config.stage, *(["lora"] if role == "adapter" else [])],
    }
    known = {name: value for name, value in front.items() if value is not None}
    parts = [
        f"---\n{yaml.safe_dump(known, sort_keys=False)}---",
        f"# {title}",
        f"{what}{shown(base)} after {state['step']} steps of {STAGES[config.stage]} on {data}{reward}. "
        f"Trained with ppo_ds {version('ppo_ds')}.",
        LOCAL_BASE if role == "adapter" and not on_hub(base) else "",
        f"## Use\n\n```python\n{USE[role].format(name=name or '.')}```" if role in USE else "",
        "## Results" if role != "critic" else "",
        held_out_table(before, records) if role != "critic" else "",
        last_metrics(records[-1]) if records and role != "critic" else "",
        f"![Curves of the training run]({CURVES})" if drawn else "",
        "## Settings",
        settings_table(config),
    ]
    write_file(folder / CARD, "\n\n".join(part for part in parts if part) + "\n")


def remove_local_base(adapter: Path) -> None:
    """Replaces the base model in adapter_config.json by the last part of its path unless it is on the Hub."""
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path") or ""
    if base and not on_hub(base):
        write_file(file, json.dumps(settings | {"base_model_name_or_path": Path(base).name}, indent=2) + "\n")


def held_out_table(before: Metrics, records: list[dict[str, Any]]) -> str:
    """Returns a table of the metrics before training and of the last evaluation in ``records``, if any."""
    for record in reversed(records):
        names = [name for name in before if name.startswith("eval/") and record.get(name) is not None]
        rows = [
            f"| {name.removeprefix('eval/')} | {before[name]:.4g} | {record[name]:.4g} |" for name in names
        ]
        if rows:
            head = f"| held-out data | before | after step {record['step']} |"
            return "\n".join([head, "|---|--:|--:|", *rows])
    return ""


def last_metrics(record: Metrics) -> str:
    """Returns a table of the RUN_METRICS that are in ``record``, or "" if there are none."""
    rows = [f"| {text} | {record[name]:.4g} |" for name, text in RUN_METRICS if record.get(name) is not None]
    return "\n".join([f"| at step {record['step']} | |", "|---|--:|", *rows]) if rows else ""


def settings_table(config: Config) -> str:
    values = {name: config_value(config, name) for name in SETTINGS}
    for name, role in trained_models(config).items():
        if role.lora.rank:  # all other weights are frozen
            values[f"{name}.optim.lr"] = None
            values[f"{name}.lora.lr"] = float(f"{learning_rate(role):.6g}")
    rows = [f"| `{name}` | {show(value)} |" for name, value in values.items() if value is not None]
    return "\n".join(["| key | value |", "|---|---|", *rows])


def reward_name(config: PPOConfig) -> str:
    """Returns the name of the reward model, else of the function, else of the kind of reward."""
    model = config.reward.get("model")
    if isinstance(model, dict) and model.get("path"):
        return shown(model["path"])
    if config.reward.get("path"):
        return shown(str(config.reward["path"]))
    return shown(str(config.reward.get("_target_", "unknown")).rpartition(".")[2])


def config_value(config: Config, key: str) -> Any:
    """Returns the value of a key such as algo.kl.coef, or None if the stage does not have the key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def on_hub(path: str | None) -> str | None:
    """Returns ``path`` if it is a Hub name, or None if it is a local path."""
    return path if path and HUB_NAME.fullmatch(path) and not looks_local(path) else None


def shown(path: str, kind: str = "") -> str:
    """Returns a link to a Hub name (``kind``: datasets/ for a data set), or the last part of a local path."""
    text = printable(Path(path).name).replace("`", "'")  # a checkpoint of someone else may hold Markdown
    return f"[{path}](https://huggingface.co/{kind}{path})" if on_hub(path) else f"`{text}`"
