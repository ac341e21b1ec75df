"""Runs a preset of conf/algo on given numbers.

It uses the preset's own ExperienceMaker and Learner, with models that return given numbers.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from launch.cli import CONF, load_config
from ppo_ds.assemble.algorithm import experience_maker, kl_controller, learner, masked_stop_ids
from ppo_ds.background.pending import Pending
from ppo_ds.config.schema import Config, learns_values
from ppo_ds.engine.trained import StepInfo
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ppo.collector import scores_of
from ppo_ds.ppo.health import ParityMonitor
from ppo_ds.run.health import Health
from ppo_ds.run.stage import RunContext
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.tracking.banner import Banner
from ppo_ds.types import Experience, Metrics, ScoredRollout
from tests.ops.golden import Case
from tests.support.budgets import fixed_budgets

PRESETS = sorted(file.stem for file in (CONF / "algo").glob("*.yaml"))
NAN = float("nan")
# the reward of the preset gdpo
PARTS = (
    "reward=weighted",
    *("reward@reward.parts.right.reward=function", "reward.parts.right.reward.path=pkg.mod:score"),
    *("reward@reward.parts.form.reward=format", "reward.parts.form.weight=0.2"),
    *("reward@reward.parts.logged.reward=format", "reward.parts.logged.weight=0"),
)
PROMPT, PAD, EOS, WORD = 3, 0, 2, 5  # length of the longest prompt; token ids
WIDTH = 10  # response width of every golden, and the limit of the response length
FEW_TOKENS = 30  # two or three rows per forward, so that losses are accumulated over several micro-batches

FLOAT32 = 2e-5  # relative and absolute tolerance between the trainer's float32 and float64


@cache
def composed(preset: str, *overrides: str, prompts: int = 6, samples: int = 1) -> Config:
    """Returns the config of a command line with algo=``preset``."""
    minimal = (
        "actor.model.path=org/actor",
        *(PARTS if preset == "gdpo" else ("reward=function", "reward.path=pkg.mod:score")),
        "data.path=org/prompts",
        "run.steps=2",
    )
    sizes = {
        "rollout.prompts_per_step": prompts,
        "rollout.samples_per_prompt": samples,
        "sampling.max_new_tokens": WIDTH,
    }
    sizes |= {"memory.score_tokens": FEW_TOKENS, "memory.train_tokens": FEW_TOKENS}
    return load_config(
        [*minimal, *(f"{key}={value}" for key, value in sizes.items()), f"algo={preset}", *overrides],
        world_size=1,
    )


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Holds the model outputs for B responses, R = WIDTH positions and S = R + 1 states.

    ``old`` and ``old_values`` are used while the experience is made, ``now`` and ``values`` in the updates.
    """

    mask: Tensor  # [B,R] from lengths, end token included
    scores: Tensor  # [B]
    old: Tensor  # [B,R] log-probs
    ref: Tensor  # [B,R]
    now: Tensor  # [B,R]
    old_values: Tensor | None = None  # [B,S]
    values: Tensor | None = None  # [B,S]
    finished: Tensor | None = None  # [B] bool; None: all responses are finished
    pad_id: int = PAD
    baselines: Tensor | None = None  # [prompts] scores of greedy responses
    aux: float | None = None  # balance loss with coefficient 1; None: not a mixture of experts

    @property
    def rows(self) -> int:
        return len(self.mask)

    def rollout(self) -> ScoredRollout:
        """Makes the rollout.

        Each prompt ends with the index of its row, from which the models look up their outputs.
        """
        mask, n = self.mask.bool(), self.rows
        finished = torch.ones(n, dtype=torch.bool) if self.finished is None else self.finished
        lengths = mask.sum(1)
        # prompts of 3, 2, 1, 3, ... tokens
        prompts = torch.tensor([[i % PROMPT < 1 + j for j in range(PROMPT)] for i in range(n)])
        ids = torch.full((n, PROMPT + WIDTH), self.pad_id).masked_fill(torch.cat([prompts, mask], 1), WORD)
        ids[:, PROMPT - 1] = torch.arange(n)
        ids[finished, PROMPT + lengths[finished] - 1] = EOS
        return ScoredRollout(
            ids=ids,
            attention_mask=torch.cat([prompts, mask], 1),
            response_mask=mask,
            finished=finished,
            limits=torch.full((n,), WIDTH),
            logprobs=self.old.float().masked_fill(~mask, 0.0),
            metadata=({},) * n,
            scores=self.scores.float(),
            token_scores=torch.zeros(mask.shape),
            components=({},) * n,
        )


class Told:
    """Stands in for a trained model: returns ``old`` without gradients and ``now`` with gradients.

    It records the loss and its gradient for each optimizer step, and the number of rows of each forward,
    separately for forwards with and without gradients.
    """

    module = SimpleNamespace(packed=False)

    def __init__(self, old: Tensor, now: Tensor):
        self.old, self.now = old.float(), now.float().requires_grad_()
        self.loss, self.steps, self.ended = 0.0, [], True
        self.forwards: dict[bool, list[int]] = {False: [], True: []}

    def said(self, ids: Tensor, response_width: int, columns: int) -> Tensor:
        self.forwards[torch.is_grad_enabled()].append(len(ids))
        return self.speaks_now()[ids[:, -response_width - 1], :columns]

    def speaks_now(self) -> Tensor:
        return self.now if torch.is_grad_enabled() else self.old

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()
        self.loss, self.ended = self.loss + loss.item(), last

    def local_squared_grad_norm(self) -> Tensor:
        return self.now.grad.square().sum()

    def step(self) -> StepInfo:
        assert self.ended, "a step before the last backward"
        self.steps.append((self.loss, self.now.grad.clone()))
        self.loss, self.now.grad = 0.0, None
        return StepInfo(grad_norm=0.0, lr=0.0, skipped=False, loss_scale=1.0)


class ToldActor(Told):
    """Stands in for the actor.

    With ``lagging`` the old log-probs belong to a copy, which must be swapped in first.
    """

    def __init__(self, numbers: Numbers, lagging: bool):
        unattended = ~numbers.mask.bool()
        super().__init__(
            numbers.old.float().masked_fill(unattended, NAN), numbers.now.float().masked_fill(unattended, NAN)
        )
        self.lagging, self.aux = lagging, numbers.aux
        balance_coef = None if numbers.aux is None else 1.0
        self.module = SimpleNamespace(packed=self.module.packed, balance_coef=balance_coef)

    @contextmanager
    def swapped(self):
        self.lagging = False
        yield
        self.lagging = True

    def speaks_now(self) -> Tensor:
        return self.now if self.lagging else super().speaks_now()

    def __call__(
        self,
        ids,
        attention_mask,
        response_width,
        with_entropy=False,
        with_aux=False,
        entropy_gradient=True,
        temperature=1.0,
        label_mask=None,
    ):
        logprobs = self.said(ids, response_width, response_width)
        if label_mask is not None:
            logprobs = torch.where(label_mask, logprobs, 0.0)
        return PolicyOutput(
            logprobs,
            torch.zeros(logprobs.shape) if with_entropy else None,
            None,
            torch.tensor(self.aux) if with_aux else None,
        )


class ToldCritic(Told):
    def __call__(self, ids, attention_mask, response_width):
        return self.said(ids, response_width, response_width + 1)


class ToldReference(ToldCritic):
    @contextmanager
    def resident(self):
        yield

    def __call__(self, ids, attention_mask, response_width):
        return PolicyOutput(self.said(ids, response_width, response_width), None, None, None)


@dataclass(frozen=True)
class Run:
    config: Config
    experience: Experience
    seen: Metrics
    learned: Metrics
    actor: Told
    critic: Told | None


def run_context(world, budgets) -> RunContext:
    """Makes the services of a run that is never stopped."""
    return RunContext(
        world=world,
        run_dir=Path("run"),
        stop=SimpleNamespace(raise_if_stopped=lambda: None),
        timer=PhaseTimer(world.device),
        health=Health(1),
        banner=Banner(),
        budgets=budgets,
    )


def make_and_learn(config: Config, world, numbers: Numbers, **parts: Any) -> Run:
    """Runs one PPO step without weights; ``parts`` are further arguments of the learner."""
    lagged = config.algo.old_policy == "lagged"
    context = run_context(world, fixed_budgets(world, score_tokens=config.memory.score_tokens))
    actor = ToldActor(numbers, lagged)
    critic = (
        ToldCritic(numbers.old_values, numbers.values)
        if learns_values(config) and numbers.values is not None
        else None
    )
    coef = kl_controller(config).value
    reference = ToldReference(numbers.ref.masked_fill(~numbers.mask.bool(), NAN), numbers.ref)
    make = experience_maker(
        config,
        context,
        actor=actor,
        reference=reference,
        critic=critic,
        lagged=actor if lagged else None,
        masked_stop_ids=masked_stop_ids(config.algo.train_on_eos, (EOS,), numbers.pad_id),
    )
    rollout = numbers.rollout()
    scores = scores_of(rollout)
    if numbers.baselines is not None:
        greedy = rollout.select(torch.arange(0, numbers.rows, config.rollout.samples_per_prompt))
        scores = replace(scores, greedy=replace(greedy, scores=numbers.baselines.float()))
    # In these tests the old policy always differs from the policy that learns, so its log-probs are computed
    # before the update even for a single optimizer step.
    if make.forwards.old_logprobs == "update":
        make.forwards.old_logprobs = "forward"
    experience, seen = make(rollout, Pending.of(scores), coef)
    unlimited = ParityMonitor(None, stops=True)
    learn = learner(config, context, actor=actor, critic=critic, parity=unlimited, **parts)
    experience, learned = learn(experience, coef, seed=3)
    return Run(config, experience, seen, learned, actor, critic)


def states(columns: Tensor, mask: Tensor) -> Tensor:
    """Turns values [B,R] of the states before each position into [B,S].

    Positions after the end state are NaN, so that reading them is noticed.
    """
    beyond = torch.arange(WIDTH + 1) > mask.sum(1, keepdim=True)
    return pad(columns, (0, 1), value=NAN).masked_fill(beyond, NAN)


RUNS: dict[tuple[str, ...], Run] = {}  # cache: each of a run's many outputs is a separate test


def ran(world, case: Case, numbers: Numbers, *arguments: str, **sizes: int) -> Run:
    """Returns the run of composed(*arguments, **sizes) on the numbers of a case."""
    key = (case.id, *arguments)
    if key not in RUNS:
        RUNS[key] = make_and_learn(composed(*arguments, **sizes), world, numbers)
    return RUNS[key]


def close(actual, expected) -> None:
    expected = torch.as_tensor(expected).double()
    torch.testing.assert_close(torch.as_tensor(actual).double(), expected, rtol=FLOAT32, atol=FLOAT32)


def loss_of(model: Told) -> float:
    """Returns the loss, which all optimizer steps share because rows and weights do not change."""
    losses = [loss for loss, _ in model.steps]
    close(losses, losses[:1] * len(losses))
    return losses[0]


def gradient_of(model: Told) -> Tensor:
    gradients = [gradient for _, gradient in model.steps]
    close(torch.stack(gradients), gradients[0].expand(len(gradients), -1, -1))
    return gradients[0]


def at_places(x: Tensor) -> Tensor:
    """Turns [B,S] into [B,R]; the last column must be zero."""
    assert not x[:, WIDTH].any()
    return x[:, :WIDTH]


def under(mask: Tensor, x: Tensor) -> Tensor:
    """Returns the values under the mask, [tokens]; all others must be zero."""
    assert not x[~mask.bool()].any()
    return x[mask.bool()]
