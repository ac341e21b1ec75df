"""Builds a run of the PPO stage from stand-ins."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch

from ppo_ds.algorithm.kl.controllers import AdaptiveKLController
from ppo_ds.config.registry import STAGES
from ppo_ds.config.sections.run import CheckpointConfig, RunConfig
from ppo_ds.ppo.health import KLMonitor, ParityMonitor
from ppo_ds.ppo.trainer import PPOTrainer
from ppo_ds.run.health import Health
from ppo_ds.run.loop import Run
from ppo_ds.run.saver import Saver
from ppo_ds.run.stage import HELD_OUT, Evaluation, RunContext
from ppo_ds.run.state import Selection
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.tracking.banner import Banner
from tests.ppo.algo_cases import make_experience
from tests.ppo.preset_runs import composed
from tests.support.budgets import fixed_budgets

SETTINGS = ("tracker.samples=2", "tracker.sample_tokens=0", "algo.kl.controller=adaptive")


class Stream:
    def __init__(self):
        self.n = 0

    def __next__(self):
        self.n += 1
        return f"prompts {self.n}"

    def state_dict(self):
        return {"step": self.n}

    def load_state_dict(self, state):
        self.n = state["step"]


class Maker:
    """Stands in for ExperienceMaker: returns the same rows for any rollout."""

    def __init__(self, events, rows, name="make"):
        self.events, self.rows, self.name = events, rows, name
        self.critic_only = []

    def __call__(self, rollout, scores, kl_coef, critic_only=False):
        self.events.append((self.name, rollout))
        self.critic_only.append(critic_only)
        return self.rows, {"seen": kl_coef}

    def for_pretraining(self):
        return Maker(self.events, self.rows, "make for pretraining")

    def measure_kl(self, experience):
        assert experience is self.rows
        self.events.append("kl now")
        return {"kl/before_update": 0.5, "kl/after_update": 0.25}


class Copy:
    """Stands in for a named second set of weights."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def copy(self):
        self.events.append(f"copy to {self.name}")

    @contextmanager
    def swapped(self):
        self.events.append("to the average")
        yield
        self.events.append("back")


class Counter:
    """Stands in for a component with a state."""

    def __init__(self, n=0):
        self.n = n

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


class Log:
    """Records calls as (name, first argument), and apart from them the metrics and events of each step."""

    def __init__(self, events):
        self.events, self.metrics, self.told = events, {}, []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.events.append((name, args[0] if args else None))

    def event(self, step, kind, text):
        self.told.append((step, kind, text))

    def log(self, step, metrics):
        self.events.append(("log", step))
        self.metrics[step] = metrics


def context(world, stop, run_dir=Path("run"), max_skips=2):
    """Makes the services of a run; ``stop`` lists the agreed stop reason, or None, before each step."""
    reasons = iter(stop)
    return RunContext(
        world=world,
        run_dir=run_dir,
        stop=SimpleNamespace(
            agreed_reason=lambda: next(reasons, None),
            install_handlers=lambda: None,
            raise_if_stopped=lambda: None,
        ),
        timer=PhaseTimer(torch.device("cpu")),
        health=Health(max_skips),
        banner=Banner(),
        budgets=fixed_budgets(world),
    )


def stand_ins(world, tokenizer, monkeypatch):
    """Returns a function that builds a run from stand-ins, and returns the run and the list of its actions.

    ``scores`` has the score of each held-out evaluation, from the one before the training on. ``ema`` and
    ``lagged`` tell whether the run has such weights. ``algo`` are keys of the command line.
    """

    def make(
        stop=(),
        *,
        algo=(),
        scores=None,
        ema=False,
        lagged=False,
        parts=None,
        kl_monitor=None,
        parity_monitor=None,
        total_steps=3,
        stop_at_step=None,
        eval_every=None,
        checkpoint_every=None,
        keep_best=False,
        patience=None,
        data=HELD_OUT,
    ):
        monkeypatch.setattr("ppo_ds.run.final_report.write_report", lambda *_, **__: events.append("report"))
        monkeypatch.setattr("ppo_ds.ppo.trainer.prompt_notes", lambda *_: {})
        averaged = ["actor.ema.decay=0.5", "actor.ema.evaluate=true"] if ema else []
        config = composed("standard", "run.steps=9", "run.seed=7", *SETTINGS, *averaged, *algo)
        events, prompts = [], Stream()
        services = context(world, stop)
        stage = PPOTrainer(
            context=services,
            config=config,
            total_steps=total_steps,
            data=[],
            tokenizer=tokenizer,
            weight_copies=copies(events, ema=ema, lagged=lagged),
            collect=collecting(services, prompts, events),
            learn=Learn(prompts, events, parity_monitor or ParityMonitor(None, stops=False)),
            **algorithm(events, prompts, parts or {}),
            evaluator=evaluating(events, scores, data) if scores is not None else None,
            meter=lambda rows, times, metrics: {"perf/rows": float(len(rows))},
            kl_monitor=kl_monitor or KLMonitor(None, stops=False),
        )
        stage.export = lambda run_dir: events.append(("export", run_dir))
        run = Run(
            context=stage.context,
            stage=stage,
            saver=Saver(
                context=stage.context,
                stage=stage,
                checkpoints=checkpoints(events),
                config=CheckpointConfig(every=checkpoint_every, minutes=None, keep_best=keep_best),
                selection=Selection("eval/score_mean", patience=patience),
            ),
            tracker=Log(events),
            name="a run",
            config=RunConfig(stop_at_step=stop_at_step),
            eval_every=eval_every,
            heldout=STAGES["ppo"].heldout,
        )
        return run, events

    return make


def copies(events, **wanted):
    return {name: Copy(events, name) for name, is_wanted in wanted.items() if is_wanted}


def algorithm(events, prompts, parts):
    rows = make_experience([1, 2], [2, 1])
    rows = replace(rows, ref_logprobs=rows.logprobs - 0.5)  # makes the KL positive
    # multiplies the coefficient by 1.2 whenever the KL is positive
    kl = AdaptiveKLController(0.1, target=1e-9, horizon=2)
    return {
        "make_experience": Maker(events, rows),
        "kl": kl,
        "stateful": {"kl": kl, "prompts": prompts} | parts,
    }


def collecting(services, prompts, events):
    def collect():
        events.append(next(prompts))
        with services.timer("generate"):
            return f"answers {prompts.n}", "scores", {"rollout/rounds": 1.0}

    return collect


class Learn:
    """Stands in for Learner."""

    ratios = critic = None

    def __init__(self, prompts, events, parity):
        self.prompts, self.events, self.parity = prompts, events, parity
        self.actor = SimpleNamespace(take_switched_gb=count(0.0, 0.5).__next__)

    def __call__(self, rows, kl_coef, seed, critic_only):
        self.events.append(("learn critic" if critic_only else "learn", kl_coef, seed))
        return rows, {"value/loss": float(self.prompts.n), "value/explained_var": 0.5} | (
            {} if critic_only else {"policy/loss": 1.0}
        )

    def models(self):
        return {}


def replace_learn(run, learn):
    """Makes ``learn`` the update of a run."""
    replaced = run.stage.learn
    for name in ("actor", "critic", "models", "parity", "ratios"):
        setattr(learn, name, getattr(replaced, name))
    run.stage.learn = learn


def evaluating(events, scores, data):
    results = iter(scores)

    def evaluate():
        events.append("evaluate")
        score = next(results)
        return Evaluation(
            {f"{data}/score_mean": score, f"{data}/accuracy": score / 2},
            [{"prompt": "x", "asked": "x", "response": "y", "score": score}] * 20,
            data,
        )

    return evaluate


def checkpoints(events):
    saved, kept = [], []

    def save(step, models, state, best, copies):
        events.append(("save", step, best))
        saved.append(state)
        kept.append(copies)

    def load(path, models, copies):
        kept.append(copies)
        return saved[-1]

    return SimpleNamespace(save=save, load=load, saved=saved, kept=kept)


def named(events, name):
    return [event[1] for event in events if isinstance(event, tuple) and event[0] == name]
