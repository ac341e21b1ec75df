"""Tests that additions made as in CONTRIBUTING, a table entry and a YAML file outside the repository, work.

The added stage is the one of tests/run/test_second_stage.py, which also trains it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from launch.cli import load_config
from ppo_ds.algorithm.credit.keys import ADVANTAGE_ESTIMATORS, AdvantageConfig
from ppo_ds.algorithm.credit.responses import CreditOptions, Estimate, Responses
from ppo_ds.algorithm.kl.keys import KL_ESTIMATORS, KLEstimatorEntry
from ppo_ds.algorithm.loss.aggregation import BatchTotals, Share, token_mean
from ppo_ds.algorithm.loss.keys import LOSS_AGGREGATIONS, LossConfig
from ppo_ds.algorithm.policy.keys import POLICY_LOSSES, PPO, PolicyConfig
from ppo_ds.algorithm.policy.losses import ppo
from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss, unclipped
from ppo_ds.assemble.generator import build_generator
from ppo_ds.config.schema import Config, add_own_code
from ppo_ds.config.targets import bind
from ppo_ds.errors import RunError
from ppo_ds.models.policy import Policy
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.planning.budgets import with_cpu_limits
from ppo_ds.ppo.collector import RolloutCollector, scored
from ppo_ds.rewards.base import start_scoring
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.keys import BACKENDS, RolloutConfig
from ppo_ds.types import Prompts, Rollout, ScoredRollout
from tests.ppo.conftest import ThreadWorld
from tests.ppo.preset_runs import WIDTH, Run, gradient_of, make_and_learn
from tests.ppo.test_preset_goldens import OFFERED, dialogue
from tests.rollout.plain_backend import PlainGenerator

# -- parts of an algorithm


def doubled_scores(responses: Responses, options: CreditOptions) -> Estimate:
    """Returns twice the score of each response as its advantage."""
    return responses.of_responses(2 * responses.totals)


def tripled_loss(terms: PolicyTerms, policy: PolicyConfig) -> TokenLoss:
    """Returns three times the PPO loss."""
    loss, *clipped = ppo(terms, policy)
    return TokenLoss(3 * loss, *clipped)


def doubled_difference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns twice the estimate k1."""
    return 2 * (logprobs - ref_logprobs)


def doubled_mean(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Returns the mean of twice the loss."""
    return token_mean(2 * loss, mask, totals)


def config(folder: Path, *arguments: str) -> Config:
    given = [
        "--config-dir",
        str(folder),
        "actor.model.path=org/actor",
        "data.path=org/prompts",
        "run.steps=2",
    ]
    given += [
        "rollout.prompts_per_step=3",
        "rollout.samples_per_prompt=2",
        f"sampling.max_new_tokens={WIDTH}",
    ]
    return with_cpu_limits(load_config([*given, *arguments]))


def run(folder: Path, preset: str) -> Run:
    made = config(folder, f"algo={preset}", "reward=function", "reward.path=pkg.mod:score")
    numbers = replace(dialogue(OFFERED["verl"]), old_values=None, values=None)
    return make_and_learn(made, one_rank(), numbers)


def one_rank() -> ThreadWorld:
    return ThreadWorld(0, 1, threading.Barrier(1), [None])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for group in ("algo", "model", "reward"):
        (tmp_path / group).mkdir()
    return tmp_path


def test_a_model(folder: Path) -> None:
    (folder / "model" / "mine.yaml").write_text("path: org/mine\ndtype: fp32\n")
    rewarded = ("reward=function", "reward.path=pkg.mod:score")
    made = load_config(
        ["--config-dir", str(folder), "model@actor.model=mine", "data.path=org/prompts", *rewarded]
        + ["rollout.prompts_per_step=2", "sampling.max_new_tokens=4", "run.steps=2"]
    )
    assert (made.actor.model.path, made.actor.model.dtype) == ("org/mine", "fp32")


def test_an_algorithm_of_existing_parts(folder: Path) -> None:
    (folder / "algo" / "mine.yaml").write_text(
        "advantage: { estimator: dr_grpo, whiten: none }\nkl: { coef: 0 }\nreward_shaping: { clip: null }\n"
    )
    experience = run(folder, "mine").experience
    baseline = experience.scores.view(-1, 2).mean(1).repeat_interleave(2)  # two responses per prompt
    expected = (experience.scores - baseline)[:, None] * experience.response_mask
    assert expected.any()
    torch.testing.assert_close(experience.advantages, expected)


def test_an_advantage_estimator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "doubled", AdvantageConfig)  # absent again after the test

    class Doubled(AdvantageConfig):
        """Twice the score."""

        estimator: Literal["doubled"] = "doubled"
        function = f"{__name__}.doubled_scores"
        needs_group = True

    own = "advantage: { estimator: doubled, whiten: none }\nkl: { coef: 0 }\n"
    (folder / "algo" / "mine.yaml").write_text(own + "reward_shaping: { clip: null }\n")
    experience = run(folder, "mine").experience
    expected = 2 * experience.scores[:, None] * experience.response_mask
    torch.testing.assert_close(experience.advantages, expected)


def no_estimate(responses: Responses, options: CreditOptions) -> None:
    """Returns nothing."""


def estimate_of_rows(responses: Responses, options: CreditOptions) -> Estimate:
    """Returns one advantage for each response instead of one for each token."""
    return Estimate(responses.scores)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_estimate, "returned NoneType; it must return Estimate"),
        (estimate_of_rows, r"returned advantages of shape \(6,\); it must be that of mask, \(6, \d+\)"),
    ],
)
def test_an_estimator_with_a_wrong_result_is_named(folder, monkeypatch, function, problem) -> None:
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "wrong", AdvantageConfig)  # absent again after the test
    add_own_code("algo.advantage.estimator", "wrong", function, f"{__name__}.{function.__name__}")
    (folder / "algo" / "mine.yaml").write_text("advantage: { estimator: wrong }\nkl: { coef: 0 }\n")
    with pytest.raises(RunError, match=f"^wrong {problem}"):
        run(folder, "mine")


def loss_of_rows(terms: PolicyTerms, policy: PolicyConfig) -> TokenLoss:
    """Returns one loss for each response instead of one for each token."""
    return unclipped((terms.ratio * terms.advantages).sum(1))


def test_a_loss_of_a_wrong_shape_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY_LOSSES, "wrong", PPO)  # absent again after the test
    add_own_code("algo.policy.loss", "wrong", loss_of_rows, f"{__name__}.loss_of_rows")
    (folder / "algo" / "mine.yaml").write_text(
        "policy: { loss: wrong }\nadvantage: { estimator: dr_grpo, whiten: none }\n"
    )
    with pytest.raises(RunError, match=r"^wrong returned loss of shape \(\d,\); it must be that of mask"):
        run(folder, "mine")


def test_a_policy_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY_LOSSES, "tripled", PPO)  # absent again after the test

    class Tripled(PPO):
        """Three times PPO's."""

        loss: Literal["tripled"] = "tripled"
        function = f"{__name__}.tripled_loss"

    common = "advantage: { estimator: dr_grpo, whiten: none }\nentropy: { coef: 0 }\n"
    (folder / "algo" / "mine.yaml").write_text(common + "policy: { loss: tripled }\n")
    (folder / "algo" / "usual.yaml").write_text(common)
    mine, usual = (gradient_of(run(folder, preset).actor) for preset in ("mine", "usual"))
    assert usual.any()
    torch.testing.assert_close(mine, 3 * usual)


def test_a_kl_estimator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = KLEstimatorEntry(f"{__name__}.doubled_difference", "Twice k1.")
    monkeypatch.setitem(KL_ESTIMATORS, "doubled", entry)
    common = "advantage: { estimator: reinforce, whiten: none }\n"
    for name, kl in (("mine", "doubled, coef: 0.1"), ("usual", "k1, coef: 0.2"), ("none", "k1, coef: 0")):
        text = common + f"kl: {{ place: reward, estimator: {kl} }}\n"
        (folder / "algo" / f"{name}.yaml").write_text(text)
    mine, usual, none = (run(folder, preset).experience.rewards for preset in ("mine", "usual", "none"))
    torch.testing.assert_close(mine, usual)
    assert not torch.allclose(mine, none)


def test_a_loss_aggregation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSS_AGGREGATIONS, "doubled", LossConfig)  # absent again after the test

    class Doubled(LossConfig):
        """Twice the mean."""

        agg: Literal["doubled"] = "doubled"
        function = f"{__name__}.doubled_mean"

    common = "advantage: { estimator: dr_grpo, whiten: none }\n"
    (folder / "algo" / "mine.yaml").write_text(common + "loss: { agg: doubled }\n")
    (folder / "algo" / "usual.yaml").write_text(common)
    mine, usual = (gradient_of(run(folder, preset).actor) for preset in ("mine", "usual"))
    assert usual.any()
    torch.testing.assert_close(mine, 2 * usual)


# -- rewards and decode backends, in the collection of a rollout

TOKENIZER = character_tokenizer("abcdefgh")
SAMPLING = SamplingParams(WIDTH, 0, 1.0, 1.0, 0, stop_token_ids=(1,), stop_strings=())

OWN_REWARDS = """
from ppo_ds.rewards.base import TextReward
import torch


def lengths(prompts, responses, rows):
    return [len(response) for response in responses]


class Letters(TextReward):
    '''Counts a letter.'''

    def __init__(self, letter: str = "a", *, tokenizer):
        super().__init__(tokenizer)
        self.letter = letter

    def score_responses(self, responses):
        return torch.tensor([float(text.count(self.letter)) for text in responses.texts])
"""


class Actor:
    """A tiny Llama that provides its causal LM only inside generation mode."""

    lockstep_max = None

    def __init__(self, world: ThreadWorld):
        torch.manual_seed(0)
        small = dict(vocab_size=TOKENIZER.id_bound, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        lm = LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, initializer_range=0.5))
        self.module, self.world, self.inside = Policy(lm, temperature=1.0), world, False

    def __call__(self, *rows: Any) -> Any:
        return self.module(*rows)

    @contextmanager
    def generation_mode(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    @property
    def lm(self) -> LlamaForCausalLM:
        assert self.inside
        return self.module.lm


def collected(config: Config) -> tuple[ScoredRollout, list[str]]:
    """Returns a rollout with the config's decode backend and reward, and the lines of the banner."""
    world, notes = one_rank(), []
    actor = Actor(world)
    ids = torch.tensor([[0, 0, 3], [0, 4, 5], [6, 7, 8], [0, 9, 3]])
    metadata = tuple({"prompt_text": text} for text in ("a", "bc", "def", "ga"))
    prompts = Prompts(ids, ids > 0, torch.full((len(ids),), WIDTH), metadata)

    class Source:
        def __len__(self) -> int:
            return len(ids)

        def batch(self, rows: list[int]) -> Prompts:
            return prompts.select(torch.tensor(rows))

    inputs = SimpleNamespace(tokenizer=TOKENIZER, source=Source(), longest_prompt=3)
    generator, *_ = build_generator(config, world, inputs, actor, SAMPLING, lambda: False, notes.append)
    collector = RolloutCollector(
        prompts=iter([prompts]),
        actor=actor,
        generator=generator,
        start_scoring=partial(start_scoring, bind(config.reward, "reward")(tokenizer=TOKENIZER)),
        sampling=SAMPLING,
        timer=lambda phase: nullcontext(),
        check=lambda: None,
    )
    rollout, scores, _ = collector()
    return scored(rollout, scores.result()), notes


def texts(rollout: Rollout) -> list[str]:
    ids = rollout.ids[:, rollout.prompt_width :]
    return [
        TOKENIZER.decode(row[mask].tolist()) for row, mask in zip(ids, rollout.response_mask, strict=True)
    ]


def test_a_reward_function(folder: Path) -> None:
    (folder / "mine.py").write_text(OWN_REWARDS)
    own = f"_target_: ppo_ds.rewards.function.FunctionReward\npath: {folder}/mine.py:lengths\n"
    (folder / "reward" / "mine.yaml").write_text(own)
    rollout, _ = collected(config(folder, "algo=grpo", "reward=mine"))
    expected = [len(text) for text in texts(rollout)]
    assert any(expected) and rollout.scores.tolist() == expected


def test_a_reward_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own_rewards.py").write_text(OWN_REWARDS)
    monkeypatch.syspath_prepend(folder)
    (folder / "reward" / "mine.yaml").write_text("_target_: own_rewards.Letters\nletter: b\n")
    for letter, more in (("b", []), ("c", ["reward.letter=c"])):
        rollout, _ = collected(config(folder, "algo=grpo", "reward=mine", *more))
        expected = [text.count(letter) for text in texts(rollout)]
        assert any(expected) and rollout.scores.tolist() == expected


def test_a_decode_backend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = []

    class Recording(PlainGenerator):
        def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
            rollouts.append(super().__call__(prompts, sampling))
            return rollouts[-1]

    monkeypatch.setattr("tests.rollout.plain_backend.PlainGenerator", Recording)
    monkeypatch.setitem(BACKENDS, "mine", RolloutConfig)  # absent again after the test

    class Mine(RolloutConfig):
        """Decodes without a cache."""

        backend: Literal["mine"] = "mine"
        generator = "tests.rollout.plain_backend.PlainGenerator"

    rewarded = ("algo=grpo", "reward=function", f"reward.path={folder}/scores.py:lengths")
    (folder / "scores.py").write_text(OWN_REWARDS)
    rollout, notes = collected(config(folder, *rewarded, "rollout.backend=mine"))
    assert notes == ["decode     mine: rollout.backend=mine"]
    checked, own = rollouts  # one rollout of the parity check, one of the step
    assert torch.equal(rollout.ids, own.ids) and torch.equal(rollout.logprobs, own.logprobs)
    assert len(set(texts(rollout))) > 1 and len(checked) == 8
