"""What a run leaves behind, and how it looks when it is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.tracking.report import before_after, plot_curves
from ppo_ds.types import Metrics

Row = dict[str, Any]


class RunDirectory:
    """``run.dir``: config.yaml metrics.jsonl summary.json samples/ checkpoints/ model/ adapter/ critic/ curves.png."""

    def __init__(self, path: Path, *, world: World, tokenizer: Tokenizer, title: str):
        self.path = path
        self.world = world
        self.tokenizer = tokenizer
        self.title = title

    def export(self, actor: TrainedModel, critic: TrainedModel | None, ema: WeightCopy | None) -> None:
        """``model/``, ``critic/`` and ``model_ema/`` in Hugging Face format, each with the tokenizer; ``adapter/`` in peft's. A collective."""

        def save(folder: Path, weights: dict[str, Tensor]) -> None:
            actor.module.save(folder, weights)
            actor.module.save_adapter(self.path / "adapter", weights)

        self._save(actor, self.path / "model", "lm.", save)
        if critic is not None:
            self._save(critic, self.path / "critic", "model.", critic.module.save)
        if ema is not None:
            with ema.swapped():
                self._save(actor, self.path / "model_ema", "lm.", actor.module.save)

    def _save(self, model: TrainedModel, folder: Path, prefix: str, save: Callable[..., None]) -> None:
        weights = consolidated(model)
        if weights is not None:
            save(
                folder,
                {
                    name.removeprefix(prefix): weight
                    for name, weight in weights.items()
                    if name.startswith(prefix)
                },
            )
            self.tokenizer.save(folder)

    def report(
        self,
        before: Metrics | None,
        after: Metrics | None,
        rows_before: list[Row],
        rows_after: list[Row],
        *,
        exported: bool,
        checkpoint: str | None = None,
    ) -> None:
        """The curves, the held-out table and sample answers, for a person. On rank 0 alone.

        No tables where nothing was ``exported``: the run was broken off, and its last evaluation is of some step before.
        ``checkpoint``: where, and how it goes on.
        """
        drawn = plot_curves(
            self.path / "metrics.jsonl", self.path / "curves.png", title=self.title, before=before
        )
        names = ("accuracy", "score_mean", "resp_len_mean")
        measured = [name for name in names if exported and before and after and f"eval/{name}" in before]
        scores = {name: (before.get(f"eval/{name}"), after.get(f"eval/{name}")) for name in measured}
        answers = {row["prompt"]: row for row in rows_after}
        samples = [
            {
                "prompt": row["asked"],
                "before": row["response"],
                "after": now["response"],
                "score": now["score"],
            }
            for row in rows_before
            if exported and (now := answers.get(row["prompt"]))
        ]
        saved: dict[str, Path | str] = {"model": self.path / "model"} if exported else {}
        if drawn:
            saved["curves"] = self.path / "curves.png"
        saved["metrics"] = self.path / "metrics.jsonl"
        if checkpoint:
            saved["checkpoint"] = checkpoint
        before_after(scores, samples, saved)
