"""PPO stage: trains a policy from the scores of its responses.

One step, as in Ouyang et al. 2022 (InstructGPT) and Schulman et al. 2017:
  1. collect           the actor responds to a batch of prompts, the reward scores the responses
  2. make_experience   log-probs, KL to the reference, rewards per token, values, advantages (GAE), returns
  3. learn             several epochs of clipped policy and value updates over shuffled minibatches
  4. kl.update         the controller adjusts the KL coefficient

Options: the critic is trained alone before the first policy update (algo.value.pretrain_rollouts; VC-PPO,
Yuan et al. 2025), the old policy lags behind the actor (algo.old_policy), and prompts with equal scores are
replaced (algo.dynamic_sampling; DAPO, Yu et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_ds.algorithm.kl.controllers import FixedKLController
from ppo_ds.algorithm.kl.keys import ControlledKL
from ppo_ds.config.schema import PPOConfig
from ppo_ds.data.fingerprint import Fingerprint
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ppo.collector import RolloutCollector
from ppo_ds.ppo.experience import ExperienceMaker
from ppo_ds.ppo.experience_metrics import decode_gap, describe, histograms
from ppo_ds.ppo.failure_dump import dump_failure
from ppo_ds.ppo.health import KLMonitor
from ppo_ds.ppo.learner import Learner
from ppo_ds.ppo.meter import Meter
from ppo_ds.ppo.sample_rows import prompt_notes, sample_rows
from ppo_ds.run.export import export_actor, export_model
from ppo_ds.run.health import TooManySkips
from ppo_ds.run.stage import Evaluation, RunContext, Stateful, StepResult
from ppo_ds.run.state import is_due
from ppo_ds.types import Experience, Histogram, Metrics

FIRST_PRETRAINING_SEED = 500_000  # above every step index, so that pretraining and steps have different seeds


@dataclass(kw_only=True)
class PPOTrainer:
    """The PPO stage. run/stage.py documents the methods, which run/loop.py calls."""

    context: RunContext
    config: PPOConfig
    total_steps: int
    data: Sequence[Fingerprint]
    tokenizer: Tokenizer

    weight_copies: Mapping[str, WeightCopy]  # "ema": the average of the actor, "lagged": the old policy

    # algorithm
    collect: RolloutCollector
    make_experience: ExperienceMaker
    learn: Learner
    kl: FixedKLController
    stateful: Mapping[str, Stateful]  # the components whose state a checkpoint saves

    # reporting
    evaluator: Callable[[], Evaluation] | None
    meter: Meter
    kl_monitor: KLMonitor
    pretraining_metrics: Metrics = field(init=False, default_factory=dict)  # logged with the first step

    def start(self) -> None:
        """Pretrains the critic on returns of the initial policy, before the first policy update."""
        count = self.config.algo.value.pretrain_rollouts
        if not count:
            return
        make_experience = self.make_experience.for_pretraining()
        for i in range(count):
            if self.context.stop.agreed_reason() is not None:
                return
            rollout, scores, _ = self.collect()
            experience, _ = make_experience(rollout, scores, self.kl.value)
            seed = self.minibatch_seed(FIRST_PRETRAINING_SEED + i)
            with self.context.budgets.ending(self.context.budgets.train, "the update"):
                _, learned = self.learn(experience, self.kl.value, seed=seed, critic_only=True)
            self.pretraining_metrics = {
                f"value/pretrain_{name}": learned[f"value/{name}"] for name in ("loss", "explained_var")
            }

    def step(self, index: int) -> StepResult:
        algo, logged = self.config.algo, self.config.tracker
        # 1. responses; a slow reward scores them in the background
        rollout, scores, collected = self.collect()
        per_prompt = self.config.rollout.samples_per_prompt
        notes = prompt_notes(rollout, logged.samples, per_prompt, self.context.world)

        # 2. log-probs, KL, values, scores, advantages
        kl_coef, critic_only = self.kl.value, index < algo.value.warmup_steps
        experience, made = self.make_experience(rollout, scores, kl_coef, critic_only=critic_only)
        self.context.stop.raise_if_stopped()  # a later stop request does not interrupt the step
        # otherwise the update checks its first forward
        if experience.logprobs is not None and algo.old_logprobs != "rollout":
            self.learn.parity.stop_if_exceeded(float(decode_gap(experience)["parity/logp_abs_diff_mean"]))

        # 3. clipped updates
        with self.context.budgets.ending(self.context.budgets.train, "the update"):
            experience, learned = self.learn(
                experience, kl_coef, seed=self.minibatch_seed(index), critic_only=critic_only
            )
        # MiniMind counts steps from 1 and updates its copy before each step that is a multiple of lag
        if "lagged" in self.weight_copies and is_due(index + 2, algo.lag):
            self.weight_copies["lagged"].copy()
        metrics = (
            describe(
                experience,
                kl_coef=kl_coef,
                samples_per_prompt=per_prompt,
                decoded_logprobs=algo.old_logprobs == "rollout",
            )
            | ({"kl/target": algo.kl.target} if isinstance(algo.kl, ControlledKL) else {})
            | collected
            | made
            | learned
            | self.pretraining_metrics
        )
        self.pretraining_metrics = {}
        if algo.kl.after_update and experience.logprobs is not None:
            metrics |= self.make_experience.measure_kl(experience)

        # 4. KL coefficient; without a reference the KL is NaN and the controller ignores it
        if isinstance(algo.kl, ControlledKL):
            unit = "seq" if algo.kl.unit == "sequence" else "token"
            self.kl.update(metrics.get(f"kl/ref_{unit}_mean", math.nan), len(experience))

        exceeded = self.kl_monitor.warning(metrics)
        ends_run = self.kl_monitor.stops
        warnings = (self.learn.parity.warning(metrics), None if ends_run else exceeded)
        return StepResult(
            metrics=metrics,
            episodes=len(experience),
            tokens=int(experience.response_lengths.sum()),
            samples=self.sample_rows(experience, notes),
            histograms=self.histograms(experience) if logged.logs_histograms else {},
            performance=lambda costs: self.meter(experience, costs, metrics),
            warnings=tuple(warning for warning in warnings if warning is not None),
            failure=("max_kl", exceeded) if ends_run and exceeded is not None else None,
        )

    def histograms(self, experience: Experience) -> dict[str, Histogram]:
        """Returns the histograms of a step on rank 0, and {} on other ranks. All ranks must call this."""
        ratios = None if self.learn.ratios is None else self.learn.ratios.take()
        if not self.context.world.is_main:
            return {}
        return histograms(experience) | ({} if ratios is None else {"policy/ratio_hist": ratios})

    def sample_rows(self, experience: Experience, notes: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the sample rows of a step; only rank 0 logs them."""
        if not self.context.world.is_main:
            return []
        rows = sample_rows(experience, self.tokenizer, [*notes], self.config.tracker.sample_tokens)
        return [row | note for row, note in zip(rows, notes.values(), strict=True)]

    def minibatch_seed(self, index: int) -> int:
        return self.config.run.seed * 1_000_003 + index

    def evaluate(self) -> Evaluation | None:
        if self.evaluator is None:
            return None
        ema = self.weight_copies.get("ema") if self.config.actor.ema.evaluate else None
        with self.context.timer("eval"), nullcontext() if ema is None else ema.swapped():
            return self.evaluator()

    # -- checkpoints, exports and dumps ----------------------------------------------------------------------

    @property
    def actor(self) -> HybridActor:
        return self.learn.actor

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        return self.learn.models()

    @property
    def counters(self) -> Mapping[str, Callable[[], float]]:
        return {"perf/switch_gb": self.actor.take_switched_gb}

    def state_dict(self) -> dict[str, Any]:
        return {name: component.state_dict() for name, component in self.stateful.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, component in self.stateful.items():
            component.load_state_dict(state[name])
        self.pretraining_metrics = {}

    def export(self, run_dir: Path) -> None:
        export_actor(run_dir, self.actor, self.weight_copies.get("ema"), self.tokenizer)
        if (critic := self.learn.critic) is not None:
            export_model(critic, "model.", run_dir / "critic", critic.module.save, self.tokenizer)

    def dump_failure(self, error: TooManySkips, step: int, run_dir: Path) -> str:
        folder = run_dir / "dumps" / f"step_{step:06d}"
        return dump_failure(
            folder, step, error.last_skip, self.learn, self.tokenizer, run_dir / "config.yaml"
        )
