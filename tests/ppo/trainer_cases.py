"""A trainer of stand-ins."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import torch

from ppo_ds.ops.kl import AdaptiveKLController
from ppo_ds.ppo.evaluation import Evaluation
from ppo_ds.ppo.trainer import Trainer
from ppo_ds.training.health import Health, KLMonitor
from ppo_ds.training.schedule import Schedule
from ppo_ds.training.timing import PhaseTimer
from tests.ppo.algo_cases import make_experience

PLAN = dict(
    total_steps=3, stop_at_step=None, eval_every=None, checkpoint_every=None, keep_best=False, critic_warmup=0, critic_pretraining=0, lag=1,
    kl_after_update=False, samples_per_prompt=1, sample_rows=2, seed=7, kl_metric="kl/ref_seq_mean", kl_target=None,
)  # fmt: skip


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
    """Experience of some rows whatever was answered; where the actor is by now."""

    def __init__(self, events, rows, name="make"):
        self.events, self.rows, self.name = events, rows, name

    def __call__(self, rollout, kl_coef):
        self.events.append((self.name, rollout))
        return self.rows, {"seen": kl_coef}

    def kl_now(self, experience):
        assert experience is self.rows
        self.events.append("kl now")
        return {"kl/before_update": 0.5, "kl/after_update": 0.25}


class Shadow:
    """A second set of weights, by name."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def copy(self):
        self.events.append(f"copy to {self.name}")


class Counter:
    """A part with a state of its own."""

    def __init__(self, n=0):
        self.n = n

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


class Notes:
    """Records every call of any method as (name, first argument)."""

    def __init__(self, events):
        self.events = events

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.events.append((name, args[0] if args else None))


class Log(Notes):
    """What was logged of each step, too."""

    def __init__(self, events):
        super().__init__(events)
        self.metrics = {}

    def log(self, step, metrics):
        self.events.append(("log", step))
        self.metrics[step] = metrics


def stand_ins(world, tokenizer):
    """A trainer of stand-ins, and the list of what it did.

    ``scores``: of each held-out evaluation, the one before the training first. ``ema``, ``lagged``: whether there are such weights.
    """

    def make(stop=(), scores=None, ema=False, lagged=False, parts=None, max_kl=None, stops=False, **plan):
        events, saved, kept, reasons, results = [], [], [], iter(stop), iter(scores or ())
        kl, prompts = (
            AdaptiveKLController(0.1, target=1e-9, horizon=2),
            Stream(),
        )  # times 1.2 whenever the KL is above 0

        rows = make_experience([1, 2], [2, 1])
        rows = replace(rows, ref_logprobs=rows.logprobs - 0.5)  # a KL above 0

        def sample(prompts):
            events.append(next(prompts))
            with trainer.timer("generate"):
                return f"answers {prompts.n}", {"rollout/rounds": 1.0}

        @contextmanager
        def eval_weights():
            events.append("to the average")
            yield
            events.append("back")

        def evaluate():
            events.append("evaluate")
            score = next(results)
            return Evaluation(
                {"eval/score_mean": score, "eval/accuracy": score / 2},
                [{"prompt": "x", "response": "y", "score": score}] * 20,
            )

        def learn(rows, kl_coef, seed, critic_only):
            events.append(("learn critic" if critic_only else "learn", kl_coef, seed))
            return rows, {"value/loss": float(trainer.prompts.n), "value/explained_var": 0.5} | (
                {} if critic_only else {"policy/loss": 1.0}
            )

        def save(step, models, state, best, shadows):
            events.append(("save", step, best))
            saved.append(state)
            kept.append(shadows)

        def load(path, models, shadows):
            kept.append(shadows)
            return saved[-1]

        trainer = Trainer(
            world=world,
            actor=SimpleNamespace(take_switched_gb=count(0.0, 0.5).__next__),
            critic=None,
            prompts=prompts,
            sample=sample,
            make_experience=Maker(events, rows),
            make_pretraining=Maker(events, rows, "make for pretraining")
            if plan.get("critic_pretraining")
            else None,
            learn=learn,
            kl=kl,
            parts={"kl": kl, "prompts": prompts} | (parts or {}),
            ema=Shadow(events, "ema") if ema else None,
            lagged=Shadow(events, "lagged") if lagged else None,
            eval_weights=eval_weights if ema else nullcontext,
            evaluator=evaluate if scores is not None else None,
            tokenizer=tokenizer,
            tracker=Log(events),
            checkpoints=SimpleNamespace(save=save, load=load, saved=saved, kept=kept),
            stop=SimpleNamespace(agreed=lambda: next(reasons, None), listen=lambda: None, check=lambda: None),
            timer=PhaseTimer(torch.device("cpu")),
            meter=lambda rows, times, metrics: {"perf/rows": float(len(rows))},
            plan=Schedule(**PLAN | plan),
            folder=Notes(events),
            health=Health(max_skips=2),
            ceiling=KLMonitor(max_kl, stops=stops),
        )
        return trainer, events

    return make


def named(events, name):
    return [event[1] for event in events if isinstance(event, tuple) and event[0] == name]
