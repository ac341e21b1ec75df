"""The PPO loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.rng import random_states
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ops.kl import AdaptiveKLController, FixedKLController, ThresholdKLController
from ppo_ds.ppo.collector import RolloutCollector
from ppo_ds.ppo.evaluation import Evaluator
from ppo_ds.ppo.experience import ExperienceMaker
from ppo_ds.ppo.experience_metrics import describe, sample_rows
from ppo_ds.ppo.failure_dump import dump_failure
from ppo_ds.ppo.learner import Learner
from ppo_ds.tracking.tracker import Trackers
from ppo_ds.training.health import Health, KLMonitor, TooManySkips
from ppo_ds.training.performance import Meter
from ppo_ds.training.run_dir import RunDirectory
from ppo_ds.training.schedule import EXIT_CODES, GOES_ON, Schedule, Stateful, TrainState, is_due
from ppo_ds.training.stopping import Abandoned, StopRequest
from ppo_ds.training.timing import PhaseTimer, spread
from ppo_ds.types import Experience, Metrics, Prompts

log = logging.getLogger(__name__)
SHOWN_ANSWERS = 8  # held-out answers kept from before the training, for the report at the end


@dataclass(kw_only=True)
class Trainer:
    world: World
    actor: HybridActor
    critic: TrainedModel | None  # None: critic-free, or the actor has the value head
    prompts: Iterator[Prompts]
    sample: RolloutCollector
    make_experience: ExperienceMaker
    make_pretraining: ExperienceMaker | None  # the same with lambda 1
    learn: Learner
    kl: FixedKLController | AdaptiveKLController | ThresholdKLController
    parts: Mapping[str, Stateful]  # prompts among them, and a controller that steers
    ema: WeightCopy | None
    lagged: WeightCopy | None  # the old policy, where it lags behind
    eval_weights: Callable[
        [], AbstractContextManager[None]
    ]  # inside, the actor has the weights that evaluation is about
    evaluator: Evaluator | None
    tokenizer: Tokenizer
    tracker: Trackers
    checkpoints: Checkpoints
    stop: StopRequest
    timer: PhaseTimer
    meter: Meter
    plan: Schedule
    folder: RunDirectory
    health: Health  # the learner's too
    ceiling: KLMonitor
    progress: TrainState = field(init=False, default_factory=TrainState)
    reason: str = field(init=False, default="done")
    saved_step: int | None = field(init=False, default=None)
    home: Path | None = field(
        init=False, default=None
    )  # the checkpoint that this run has made last, or has begun from
    ended_by: str | None = field(
        init=False, default=None
    )  # in words, where numbers that went wrong have ended the run
    latest_eval_score: float | None = field(init=False, default=None)
    pretrained: Metrics = field(
        init=False, default_factory=dict
    )  # how the critic's pretraining ended, for the first step's line

    def fit(self) -> str:
        """Train to the end, or to where a signal or a limit ends it; returns why it ended, a key of EXIT_CODES."""
        self.stop.listen()
        try:
            self._train()
        except Abandoned:
            self.reason = "signal"
        return self._finish()

    def _train(self) -> None:
        self._evaluate_start()
        with self._back_where_skipped_too_often():
            self._pretrain_critic()
        for step in self._steps():
            with self._back_where_skipped_too_often():
                self._step(step)

    def _step(self, step: int) -> None:
        with self._undone_where_abandoned():
            rollout, sampled = self.sample(self.prompts)
            kl_coef = self.kl.value
            experience, seen = self.make_experience(rollout, kl_coef)
            self.stop.check()  # the last: a step that has begun to learn is finished
        experience, learned = self.learn(
            experience, kl_coef, seed=self._seed(step), critic_only=step < self.plan.critic_warmup
        )
        self._count(experience)
        metrics = (
            self._describe(experience, kl_coef) | sampled | seen | learned | self._after_update(experience)
        )
        self.kl.update(
            metrics.get(self.plan.kl_metric, math.nan), len(experience)
        )  # without a reference the coefficient is nobody's
        self._log(experience, metrics, self._evaluate())
        self._warn(metrics)
        self._save()

    def _steps(self) -> Iterator[int]:
        """How many steps are done, before each that is still to be done; stops where all ranks agree to stop."""
        while (reason := self._reason()) is None:
            yield self.progress.step
        self.reason = reason

    @contextmanager
    def _undone_where_abandoned(self) -> Iterator[None]:
        """Before the update a step has changed no weights: data position, controllers, running moments and random states make it undone."""
        state, put_back = deepcopy(self.state_dict()), random_states(self.world)
        try:
            yield
        except Abandoned:
            self._restore(state)
            put_back()
            raise

    def _seed(self, step: int) -> int:
        return self.plan.seed * 1_000_003 + step

    def _reason(self) -> str | None:
        step, plan = self.progress.step, self.plan
        if self.ended_by is not None:
            return self.reason
        if (asked := self.stop.agreed()) is not None:
            return asked
        if step >= plan.total_steps:
            return "done"
        return "stop_at_step" if plan.stop_at_step is not None and step >= plan.stop_at_step else None

    def _count(self, experience: Experience) -> None:
        self.progress.step += 1
        self.progress.episodes += len(experience)
        self.progress.tokens += int(experience.response_lengths.sum())
        self.progress.skips, self.health.step = self.health.skips, self.progress.step + 1

    def _pretrain_critic(self) -> None:
        """Fits the critic to the returns of the policy that it starts from, before that policy moves (VC-PPO, Yuan et al. 2025)."""
        if self.make_pretraining is None or self.progress.step:
            return
        for i in range(self.plan.critic_pretraining):
            if self.stop.agreed() is not None:
                return  # the loop will see it too
            rollout, _ = self.sample(self.prompts)
            experience, _ = self.make_pretraining(rollout, self.kl.value)
            _, learned = self.learn(experience, self.kl.value, seed=self._seed(500_000 + i), critic_only=True)
            self.pretrained = {
                f"value/pretrain_{name}": learned[f"value/{name}"] for name in ("loss", "explained_var")
            }
        self._costs()  # not part of the first step

    def _after_update(self, experience: Experience) -> Metrics:
        """What an update entails beside the weights; metrics of it where they are asked for."""
        if self.lagged is not None and is_due(self.progress.step, self.plan.lag):
            self.lagged.copy()
        found, self.pretrained = self.pretrained, {}
        known = (
            experience.logprobs is not None
        )  # not where the update was to be the first to ask, and was not made
        return found | (
            self.make_experience.kl_now(experience) if self.plan.kl_after_update and known else {}
        )

    def _describe(self, experience: Experience, kl_coef: float) -> Metrics:
        shown = describe(experience, kl_coef=kl_coef, samples_per_prompt=self.plan.samples_per_prompt)
        return shown | ({"kl/target": self.plan.kl_target} if self.plan.kl_target is not None else {})

    # -- numbers that go wrong ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _back_where_skipped_too_often(self) -> Iterator[None]:
        """Once to the last checkpoint; the next time, or without one, the run ends."""
        try:
            yield
        except TooManySkips as error:
            if self.progress.rollbacks or self.home is None:
                self.reason, self.ended_by = "nonfinite", self._last_words(error)
                return
            try:
                self._go_back(self.home, error)
            except UserError as damaged:
                self.reason, self.ended_by = (
                    "nonfinite",
                    f"{self._last_words(error)}; there is no way back: {damaged}",
                )

    def _go_back(self, home: Path, error: TooManySkips) -> None:
        step, rollbacks = self.progress.step, self.progress.rollbacks
        self.resume(home)
        self.progress.rollbacks, self.progress.skips, self.health.skips = rollbacks + 1, 0, 0
        self.latest_eval_score, self.pretrained = None, {}
        self.health.take()
        self.tracker.rewind(self.progress.step)
        self._costs()  # no part of the next step
        if self.world.is_main:
            log.warning(
                "warning: step %d: %d times in a row no optimizer step was made (%s: not finite): back to %s, once; the next time the run ends",
                step + 1, self.health.max_skips, error, home,
            )  # fmt: skip

    def _last_words(self, error: TooManySkips) -> str:
        step, path = self.progress.step + 1, self.folder.path
        line = dump_failure(
            path / "dumps" / f"step_{step:06d}",
            step,
            error.trouble,
            self.learn,
            self.tokenizer,
            path / "config.yaml",
        )
        before = f"after going back to {self.home} " if self.progress.rollbacks else ""
        since = self.health.since
        began = f"; the first of these was in step {since}" if since is not None and since < step else ""
        return f"{line}; {before}no optimizer step was made {self.health.max_skips} times in a row (health.max_skips){began}"

    def _warn(self, metrics: Metrics) -> None:
        """Of optimizer steps that were skipped, and of the KL, which may end the run."""
        lines = []
        if reasons := self.health.take():
            lines.append(
                f"{metrics['health/skipped_steps']:.0f} optimizer step(s) skipped, not finite: {', '.join(reasons)}"
            )
        if (line := self.ceiling.exceeded(metrics)) is not None:
            lines.append(line)
            if self.ceiling.stops:
                self.reason, self.ended_by = "max_kl", f"step {self.progress.step}: {lines.pop()}"
        for line in lines if self.world.is_main else []:
            log.warning("warning: step %d: %s", self.progress.step, line)

    # -- evaluation -----------------------------------------------------------------------------------------------------------------------

    def _evaluate_start(self) -> None:
        if self.progress.unevaluated is not None:
            self._make_up_for(self.progress.unevaluated)
        elif self.evaluator is not None and self.progress.step == 0:
            with self.eval_weights():
                first = self.evaluator()
            self.progress.first_eval, self.progress.first_rows = first.metrics, first.rows[:SHOWN_ANSWERS]
            self.tracker.samples(0, first.rows, split="eval")
        self._costs()  # neither this nor what came before it is part of the first step

    def _make_up_for(self, line: Metrics) -> None:
        """The last step's evaluation, before anything else; the step's line is written once more, and its checkpoint."""
        evaluated = self._evaluate()
        if evaluated is not None:
            self.tracker.log(self.progress.step, line | evaluated)
            self.progress.unevaluated, self.latest_eval_score = None, evaluated.get("eval/score_mean")
            self.saved_step = None  # that one still owes it
            self._save(last=True)

    def _evaluate(self) -> Metrics | None:
        """eval/* where one is due: every so many steps, and after the last. None: it was abandoned, and is still due."""
        step, plan = self.progress.step, self.plan
        last = step in (plan.total_steps, plan.stop_at_step)
        if self.evaluator is None or not (last or is_due(step, plan.eval_every)):
            return {}
        try:
            with self.timer("eval"), self.eval_weights():
                found = self.evaluator()
        except Abandoned:  # the step itself is done
            return None
        self.progress.last_eval, self.progress.last_rows = found.metrics, found.rows[:SHOWN_ANSWERS]
        self.tracker.samples(step, found.rows, split="eval")
        return found.metrics

    # -- what is written ------------------------------------------------------------------------------------------------------------------

    def _log(self, experience: Experience, metrics: Metrics, evaluated: Metrics | None) -> None:
        progress = self.progress
        costs = self._costs()
        counts = {
            "episodes": progress.episodes,
            "tokens": progress.tokens,
            "health/rollbacks": float(progress.rollbacks),
        }
        line = counts | metrics | (evaluated or {}) | costs | self.meter(experience, costs, metrics)
        self.tracker.log(progress.step, line)
        progress.unevaluated = dict(line) if evaluated is None else None
        if self.world.is_main:
            self.tracker.samples(
                progress.step, sample_rows(experience, self.tokenizer, self.plan.sample_rows)
            )
        self.latest_eval_score = (evaluated or {}).get("eval/score_mean")

    def _costs(self) -> Metrics:
        """Since the last call: time/*, how far the ranks are apart, and how much was gathered or moved for generation. A collective."""
        times = self.timer.take()
        return (
            times | spread(self.world, times["time/step"]) | {"perf/switch_gb": self.actor.take_switched_gb()}
        )

    def _save(self, last: bool = False) -> None:
        step, plan = self.progress.step, self.plan
        if self.progress.skips and not last:
            return  # whoever goes back is to come to where numbers were sound
        bar = -math.inf if self.progress.best_score is None else self.progress.best_score
        best = plan.keep_best and self.latest_eval_score is not None and self.latest_eval_score > bar
        if best:
            self.progress.best_score = self.latest_eval_score
        # before the first step there is nothing to keep, and a pretraining that was cut short starts afresh
        due = step > 0 and (is_due(step, plan.checkpoint_every) or (last and plan.checkpoint_every != 0))
        if (due or best) and self.saved_step != step:
            with self.timer("checkpoint"):
                self.home = self.checkpoints.save(
                    step, self._models(), self.state_dict(), best=best, shadows=self._shadows()
                )
            self.saved_step = step

    def _finish(self) -> str:
        if self.reason != "nonfinite":  # that is in the middle of a step
            self._save(last=True)
        wanted = EXIT_CODES[self.reason] == 0  # who sends a signal does not wait for an export
        if wanted:
            self.folder.export(self.actor, self.critic, self.ema)
        progress = self.progress
        self.tracker.finish(
            {"exit_reason": self.reason}
            | ({"error": self.ended_by} if self.ended_by else {})
            | progress.held_out()
        )
        if self.world.is_main:
            again = f"{self.home}   {GOES_ON[self.reason]}" if self.home and self.reason in GOES_ON else None
            self.folder.report(
                progress.first_eval,
                progress.last_eval,
                progress.first_rows,
                progress.last_rows,
                exported=wanted,
                checkpoint=again,
            )
            if self.ended_by:
                log.error("error: %s", self.ended_by)
        return self.reason

    def fail(self, error: BaseException) -> None:
        """Close the record of a run that an error has ended; nothing here is a collective."""
        self.tracker.finish({"exit_reason": "error", "error": f"{type(error).__name__}: {error}"})

    # -- state ----------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": asdict(self.progress),
            **{name: part.state_dict() for name, part in self.parts.items()},
        }

    def _models(self) -> dict[str, TrainedModel]:
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def _shadows(self) -> dict[str, WeightCopy]:
        return {
            name: shadow
            for name, shadow in (("ema", self.ema), ("lagged", self.lagged))
            if shadow is not None
        }

    def expect_room(self) -> None:
        """UserError where a checkpoint is due in what is left to do, and the disk has no room for it."""
        plan = self.plan
        if self.progress.step < plan.total_steps and (plan.checkpoint_every != 0 or plan.keep_best):
            self.checkpoints.expect_room(self._models(), self._shadows())

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint folder: weights, optimizers, schedules, random states, data position, controller, counters."""
        state = self.checkpoints.load(path, self._models(), self._shadows())
        kept = set(state) - {"progress"}
        if kept != set(self.parts):
            raise UserError(
                f"run.resume: {path} holds the state of {', '.join(sorted(kept)) or 'nothing'}, this run has {', '.join(sorted(self.parts))}: "
                "keep algo.kl.controller, algo.ptx and the kind of reward as they were, or start in another run.dir"
            )
        self._restore(state)
        self.saved_step, self.home = self.progress.step, path

    def _restore(self, state: dict[str, Any]) -> None:
        self.progress = TrainState(**state["progress"])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.health.skips, self.health.step, self.health.since = (
            self.progress.skips,
            self.progress.step + 1,
            None,
        )
