"""Runs steps and evaluations of supervised fine-tuning and of reward-model training."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ppo_ds.config.sections.finetune import RewardModelConfig, SFTConfig
from ppo_ds.distributed.world import World
from ppo_ds.finetune.optimizer_step import OptimizerStep
from ppo_ds.finetune.pair_scores import score_source
from ppo_ds.finetune.reward_model import RewardModelTrainer
from ppo_ds.finetune.sft import SFTTrainer
from ppo_ds.models.policy import Policy
from ppo_ds.models.value import ScoreModel
from ppo_ds.run.health import Health
from ppo_ds.run.stage import RunContext
from ppo_ds.run.stopping import StopRequest
from ppo_ds.types import PreferencePairs, Sequences
from tests.gpu_sim.cases import CASES as NAMES
from tests.gpu_sim.drives.parts import Case, Engine, classifier, experience, language_model, one_rank, timer
from tests.gpu_sim.fake_cuda import FakeCuda
from tests.support.budgets import fixed_budgets

TOKENS = 12  # of a row or a text


class Rows:
    """Stands in for a data source and for its stream: an endless supply of the same batch."""

    epoch = 0.0

    def __init__(self, batch: Any):
        self.whole = batch
        self.subsets = [None] * len(batch)

    def __len__(self) -> int:
        return len(self.whole)

    def __next__(self) -> Any:
        return self.whole

    def batch(self, rows: range) -> Any:
        return self.whole.select(torch.tensor(rows))


def demonstrations(count: int) -> Sequences:
    rows = experience(count)
    return Sequences(rows.ids, rows.attention_mask, rows.response_mask)


def preference_pairs(count: int) -> PreferencePairs:
    return PreferencePairs(
        ids=torch.randint(5, 500, (count, 2, TOKENS)),
        mask=torch.ones(count, 2, TOKENS, dtype=torch.bool),
        margins=torch.zeros(count),
        counted=torch.ones(count, dtype=torch.bool),
    )


def context(world: World) -> RunContext:
    return RunContext(
        world=world,
        run_dir=None,
        stop=StopRequest(world, None, None),
        timer=timer,
        health=Health(max_skips=1000),
        banner=None,
        budgets=fixed_budgets(world),
    )


def optimizer_step(run: RunContext, name: str, prefix: str, model: Engine) -> OptimizerStep:
    unused = dict.fromkeys(("ema", "capacity", "cost"))
    return OptimizerStep(context=run, name=name, prefix=prefix, model=model, ema_decay=0.0, **unused)


def sft(world: World, rows: Rows, settings: SFTConfig) -> SFTTrainer:
    """Makes the stage with micro-batches of two rows."""
    policy, run = Policy(language_model("qwen2"), 1.0), context(world)
    batch = rows.whole
    with torch.no_grad():  # the first forward of a policy waits
        policy(batch.ids, batch.attention_mask, batch.response_width)
    actor = Engine(policy, world)
    unused = dict.fromkeys(("eval_weights", "prompts", "generator", "tokenizer"))
    return SFTTrainer(
        context=run,
        config=settings,
        seed=0,
        total_steps=1,
        train_tokens=2 * TOKENS,
        score_tokens=2 * TOKENS,
        eval_rows=None,
        actor=actor,
        update=optimizer_step(run, "actor", "sft", actor),
        rows=rows,
        held_out=rows,
        **unused,
    )


def reward_model(world: World, pairs: Rows) -> RewardModelTrainer:
    """Makes the stage with micro-batches of two pairs."""
    scorer, run = Engine(ScoreModel(classifier("qwen2")), world), context(world)
    return RewardModelTrainer(
        context=run,
        config=RewardModelConfig(label_smoothing=0.1),
        total_steps=1,
        train_tokens=4 * TOKENS,
        score_tokens=4 * TOKENS,
        eval_rows=None,
        evaluate_ema=False,
        samples=None,
        scorer=scorer,
        update=optimizer_step(run, "scorer", "rm", scorer),
        rows=pairs,
        held_out=pairs,
        tokenizer=None,
        saved_settings={},
    )


def run(device: FakeCuda, what: str, number: int) -> None:
    """Runs a step of ``number`` micro-batches, or an evaluation of ``number`` forwards."""
    options = SFTConfig(label_smoothing=0.1, neftune_alpha=5.0) if what.endswith("options") else SFTConfig()
    with one_rank(device) as world:
        if "pairs" in what:
            rows = Rows(preference_pairs(2 * number))
            stage: Any = reward_model(world, rows)
            model = stage.scorer
        else:
            rows = Rows(demonstrations(2 * number))
            stage = sft(world, rows, options)
            model = stage.actor
        device.report.clear()
        if what == "held-out rows":
            with torch.no_grad():
                stage.held_out_metrics(rows)
        elif what == "held-out pairs":
            score_source(
                model,
                rows,
                most=None,
                token_budget=stage.score_tokens,
                packed=False,
                check=stage.context.stop.raise_if_stopped,
            )
        else:
            stage.step(1)
        device.report.facts["forwards"] = model.forwards


def case(name: str) -> Case:
    what, number, _ = name.rsplit(" ", 2)
    return partial(run, what=what, number=int(number))


CASES = {name: case(name) for name in NAMES["finetune"]}
