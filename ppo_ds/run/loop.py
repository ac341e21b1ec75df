"""Training loop that all stages share: steps, evaluation, logging and shutdown."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

from ppo_ds.config.sections.run import RunConfig
from ppo_ds.distributed.world import World
from ppo_ds.errors import UserError
from ppo_ds.run.alarms import Alarms
from ppo_ds.run.health import TooManySkips
from ppo_ds.run.saver import Saver
from ppo_ds.run.stage import HELD_OUT, Evaluation, RunContext, Stage, StepResult
from ppo_ds.run.state import EXIT_CODES, RESUME_HINTS, ExitReason, TrainState, is_due
from ppo_ds.run.stopping import Abandoned, StepRefused
from ppo_ds.run.timing import compare_times
from ppo_ds.secrets import censored
from ppo_ds.tracking.console import heldout_result
from ppo_ds.tracking.jsonl import read_metrics
from ppo_ds.tracking.tracker import Trackers
from ppo_ds.types import Metrics

log = logging.getLogger(__name__)
REPORTED_RESPONSES = 8  # sample responses per evaluation; the final report compares the first and the last


@dataclass(kw_only=True)
class Run:
    """Trains a stage until its end, a signal, a limit or non-finite numbers. All ranks stop together."""

    # components
    context: RunContext
    stage: Stage
    saver: Saver
    tracker: Trackers = field(default_factory=Trackers)  # empty on all ranks except rank 0
    mark_ending: Callable[[], None] = lambda: None  # tells the run directory's lock that the run is ending

    # settings
    name: str
    config: RunConfig
    eval_every: int | None  # steps between evaluations
    heldout: Mapping[str, str]  # metrics of the evaluations in summary.json (see StageEntry)

    # state of this process
    alarms: Alarms = field(init=False, default_factory=Alarms)  # used by rank 0
    reason: ExitReason = field(init=False, default="done")
    # error message if nonfinite, max_kl, max_parity or reward_error ends the run
    error: str | None = field(init=False, default=None)
    # Saver.score_of the last step's evaluation; None if there was none, or none that may select a checkpoint
    eval_score: float | None = field(init=False, default=None)
    clock: float = field(init=False, default=0.0)  # rank 0's clock after the last step, in seconds

    @property
    def world(self) -> World:
        return self.context.world

    @property
    def state(self) -> TrainState:
        """The progress of the run, saved in every checkpoint."""
        return self.saver.state

    def track(self, tracker: Trackers) -> None:
        """Sends metrics, samples, events and the summary to ``tracker`` from now on."""
        self.tracker = tracker
        self.repeat_alarms()

    def repeat_alarms(self) -> None:
        """Restores the state of the alarms from the steps in metrics.jsonl, without raising alarms again."""
        records = read_metrics(self.context.run_dir / "metrics.jsonl")
        self.alarms = Alarms.after([self.state.first_eval or {}, *records])

    def fit(self) -> ExitReason:
        """Trains, exports and reports; returns why the run ended."""
        self.context.stop.install_handlers()
        try:
            self.start()
            for index in self.steps():
                with self.rollback_on_nonfinite():
                    with self.saver.undo_if_abandoned(), self.trace_if_due():
                        result = self.stage.step(index)
                    self.count(result)
                    self.log(result, self.evaluate_if_due())
                    self.warn(result)
                    self.saver.export_if_due()
                    self.saver.save_if_due(self.eval_score, self.clock)
        except StepRefused as refused:
            self.reason, self.error = refused.reason, f"step {self.state.step + 1}: {refused}"
        except Abandoned:
            self.reason = "signal"
        return self.finish()

    def start(self) -> None:
        """Evaluates and prepares a new run; in a resumed run, repeats an interrupted evaluation."""
        step, total = self.state.step, self.stage.total_steps
        if self.saver.last_checkpoint is None:
            self.tracker.event(step, "started", f"{self.name}: {total} steps")
        else:
            checkpoint = self.saver.last_checkpoint
            self.tracker.event(step, "resumed", f"{self.name}: step {step} of {total}, from {checkpoint}")
        for text in self.context.banner.warnings:
            self.tracker.event(step, "warning", text)
        if self.state.unevaluated is not None:
            self.complete_step(self.state.unevaluated)
        elif self.state.step == 0:
            evaluation = self.evaluate()
            if evaluation is not None:
                if evaluation.data == HELD_OUT:
                    result = heldout_result(evaluation.metrics)
                    self.tracker.event(0, "evaluated", f"before the training: {result}")
                self.state.first_eval = evaluation.metrics
                self.state.first_rows = evaluation.rows[:REPORTED_RESPONSES]
                self.alarms.check(evaluation.metrics)
                self.tracker.samples(0, evaluation.rows, split=evaluation.data)
                self.saver.score_of(evaluation)  # raises UserError if it cannot select the best checkpoint
            with self.rollback_on_nonfinite():
                self.stage.start()
        self.costs()  # resets the timer for the first step
        self.saver.start_interval(self.clock)

    def steps(self) -> Iterator[int]:
        """Yields the indices of the remaining steps until all ranks agree on a reason to end."""
        while self.error is None:
            step = self.state.step
            requested = self.context.stop.agreed_reason()
            if requested == "signal":
                self.reason = requested
            elif self.reason == "time_limit":
                pass
            elif step >= self.stage.total_steps:
                self.reason = "done"
            elif self.config.stop_at_step is not None and step >= self.config.stop_at_step:
                self.reason = "stop_at_step"
            elif self.state.evals_without_improvement >= (self.saver.selection.patience or math.inf):
                self.reason = "early_stop"
            else:
                yield step
                continue
            return

    def trace_if_due(self) -> AbstractContextManager[None]:
        """Returns a context manager that traces its block if the next step's number is run.profile."""
        step = self.state.step + 1
        folder = self.context.run_dir / "profile" / f"step_{step:06d}"
        return self.context.timer.trace(folder, self.world) if step == self.config.profile else nullcontext()

    def count(self, result: StepResult) -> None:
        self.state.step += 1
        self.state.episodes += result.episodes
        self.state.tokens += result.tokens
        self.context.health.set_step(self.state.step + 1)

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self) -> Evaluation | None:
        """Evaluates, and updates the time that is reserved before run.max_minutes for a last evaluation."""
        begin = time.monotonic()
        evaluation = self.stage.evaluate()
        self.context.stop.reserved = time.monotonic() - begin
        return evaluation

    def evaluate_if_due(self) -> Evaluation | None:
        """Evaluates if due; returns the held-out evaluation, empty if there is none.

        Returns None if a stop request interrupts the evaluation, or an error of the reward, which also ends
        the run.
        """
        step, self.eval_score = self.state.step, None
        if self.context.stop.agreed_reason() == "time_limit":
            self.reason = "time_limit"
        ends = self.reason == "time_limit" or step in (self.stage.total_steps, self.config.stop_at_step)
        if not ends and not is_due(step, self.eval_every):
            return Evaluation({}, [])
        try:
            evaluation = self.evaluate()
        except StepRefused as refused:
            self.reason, self.error = refused.reason, f"step {step}, evaluation: {refused}"
            return None
        except Abandoned:
            return None
        if evaluation is None:
            return Evaluation({}, [])
        self.state.last_eval, self.state.last_rows = evaluation.metrics, evaluation.rows[:REPORTED_RESPONSES]
        self.state.last_eval_step = step
        self.tracker.samples(step, evaluation.rows, split=evaluation.data)
        if evaluation.data != HELD_OUT:
            return Evaluation({}, [])
        # An evaluation outside the schedule, at a stop, selects no checkpoint and does not count for the
        # patience, so that a resumed run has the same best checkpoint and ends at the same step. The last
        # evaluation of the run may select.
        if step == self.stage.total_steps or is_due(step, self.eval_every):
            self.eval_score = self.saver.score_of(evaluation)
        if self.eval_score is not None and is_due(step, self.eval_every):
            self.state.count_evaluation(self.eval_score)
        return evaluation

    def complete_step(self, metrics: Metrics) -> None:
        """Repeats the interrupted evaluation of the last step, then logs and saves the step again."""
        evaluated = self.evaluate_if_due()
        if evaluated is not None:
            self.tracker.log(self.state.step, metrics | evaluated.metrics)
            self.raise_alarms(evaluated.metrics)
            self.state.unevaluated = None
            # saves again, since the checkpoint that the run resumed from lacks the evaluation
            self.saver.save_if_due(self.eval_score, self.clock, last=True, again=True)

    # -- logging ---------------------------------------------------------------------------------------------

    def log(self, result: StepResult, evaluation: Evaluation | None) -> None:
        """Logs a step; ``evaluation`` is None if it was interrupted."""
        state, costs, rollbacks = self.state, self.costs(), float(self.state.rollbacks)
        counts = {"episodes": state.episodes, "tokens": state.tokens, "health/rollbacks": rollbacks}
        evaluated = evaluation.metrics if evaluation is not None else {}
        line = counts | result.metrics | evaluated | costs | result.performance(costs)
        self.tracker.log(state.step, line)
        self.raise_alarms(line)
        self.tracker.samples(state.step, result.samples)
        if result.histograms:
            self.tracker.histograms(state.step, result.histograms)
        state.unevaluated = dict(line) if evaluation is None else None

    def raise_alarms(self, metrics: Metrics) -> None:
        """Logs the alarms that are raised by the metrics of the last step."""
        for text in self.alarms.check(metrics) if self.world.is_main else []:
            log.warning("alarm: step %d: %s", self.state.step, text)
            self.tracker.event(self.state.step, "alarm", text)

    def costs(self) -> Metrics:
        """Returns time/* and the stage's counters since the last call. All ranks must call this."""
        times = self.context.timer.take()
        spread, self.clock = compare_times(self.world, times["time/step"])
        return times | spread | {name: take() for name, take in self.stage.counters.items()}

    def warn(self, result: StepResult) -> None:
        """Logs the warnings of the step; if ``result.failure`` is set, makes it the last step."""
        warnings = list(result.warnings)
        if reasons := self.context.health.take_reasons():
            skipped = f"{result.metrics['health/skipped_steps']:.0f} optimizer step(s) skipped"
            warnings.insert(0, f"{skipped}, not finite: {', '.join(reasons)}")
        if result.failure is not None:
            reason, text = result.failure
            self.reason, self.error = reason, f"step {self.state.step}: {text}"
        for text in warnings if self.world.is_main else []:
            log.warning("warning: step %d: %s", self.state.step, text)
            self.tracker.event(self.state.step, "warning", text)

    # -- non-finite numbers ----------------------------------------------------------------------------------

    @contextmanager
    def rollback_on_nonfinite(self) -> Iterator[None]:
        """Returns to the last checkpoint if the block raises TooManySkips.

        Ends the run instead if there is no checkpoint, if it is damaged, or if there was a rollback before.
        """
        try:
            yield
        except TooManySkips as error:
            damage, failed = "", self.state.step + 1
            if self.saver.can_roll_back:
                try:
                    self.saver.roll_back(error)
                except UserError as damaged:
                    damage = f"; the rollback failed: {damaged}"
                else:
                    self.eval_score = None
                    self.tracker.rewind(self.state.step)
                    reason = f"step {failed}: {error}: not finite; repeated after step {self.state.step}"
                    self.tracker.event(self.state.step, "rolled_back", reason)
                    if self.world.is_main:
                        self.repeat_alarms()
                    self.costs()  # resets the timer for the next step
                    return
            self.reason, self.error = "nonfinite", self.dump_failure(error) + damage

    def dump_failure(self, error: TooManySkips) -> str:
        """Dumps the last skipped optimizer step and returns the message that ends the run."""
        step = self.state.step + 1
        line = self.stage.dump_failure(error, step, self.context.run_dir)
        before = f"after the rollback to {self.saver.last_checkpoint} " if self.state.rollbacks else ""
        return f"{line}; {before}{self.context.health.limit_reached(step)}"

    # -- shutdown --------------------------------------------------------------------------------------------

    def finish(self) -> ExitReason:
        """Saves, exports and reports; returns the reason."""
        self.mark_ending()
        if self.reason != "nonfinite":  # non-finite numbers end the run in the middle of a step
            self.saver.save_if_due(self.eval_score, self.clock, last=True)
        # no export after a signal, since its sender waits for the exit
        succeeded = EXIT_CODES[self.reason] == 0
        if succeeded:
            self.stage.export(self.context.run_dir)
        error = {"error": self.error} if self.error else {}
        explanation = self.error or self.about_best()
        ending = f"{self.reason}: {explanation}" if explanation else self.reason
        self.tracker.event(self.state.step, "ended", ending)
        best = self.state.best_metrics(self.saver.selection)
        results = self.state.heldout_metrics(self.heldout) | best
        self.tracker.finish({"exit_reason": self.reason} | error | results)
        if self.world.is_main:
            from ppo_ds.run.final_report import write_report  # matplotlib takes half a second to import

            saved, hint = self.saver.last_checkpoint, RESUME_HINTS.get(self.reason)
            checkpoint = f"{saved}   {hint}" if saved and hint else None
            write_report(
                self.context.run_dir,
                self.name,
                self.state,
                exported=succeeded,
                checkpoint=checkpoint,
                best=best,
                lists_files=self.config.dry_run is not True,  # a dry run deletes them at its end
            )
            if self.error:
                kept = f"; step {self.state.step} is saved in {checkpoint}" if checkpoint else ""
                log.error("error: %s", censored(self.error + kept))
            elif explanation:
                log.warning("%s", ending)
        return self.reason

    def about_best(self) -> str:
        """Explains an end by eval.patience, or that no evaluation beat the first; otherwise returns ""."""
        state, selection = self.state, self.saver.selection
        best, first, parts = state.best_metrics(selection), state.first_eval or {}, []
        if self.reason == "early_stop":
            parts.append(
                f"no better {selection.metric} in {state.evals_without_improvement} evaluation(s) in a row "
                f"(eval.patience={selection.patience})"
            )
        if best:
            found = f"the best is {best['best_value']:.4g} at step {state.best_step}"
            untrained = selection.score(first) if selection.metric in first else -math.inf
            if state.best_score is not None and untrained >= state.best_score:
                parts.append(
                    f"no {selection.metric} was better than the {first[selection.metric]:.4g} before the "
                    f"training; {found}"
                )
            elif parts:
                parts.append(found)
        return "; ".join(parts)

    def fail(self, error: BaseException) -> None:
        """Closes the trackers of a run that ``error`` has ended. Not a collective."""
        self.mark_ending()
        message = f"{type(error).__name__}: {error}"
        with suppress(OSError):  # on a full disk, the error that ended the run is still printed
            self.tracker.event(self.state.step, "ended", f"error: {message}")
            self.tracker.finish({"exit_reason": "error", "error": message})
