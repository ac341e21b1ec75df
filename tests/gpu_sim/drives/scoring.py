"""Runs rewards by sequence classifiers, and evaluations on held-out prompts.

A reward model that scores with its own code (get_score) is left out, because its code determines when it
waits.
"""

from __future__ import annotations

from functools import partial

import torch

from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.models.value import ScoreModel
from ppo_ds.ppo.evaluation import Evaluator
from ppo_ds.rewards.model import ModelReward
from ppo_ds.rewards.text import EncodedText, TextEncoder
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import Prompts
from tests.gpu_sim.cases import CASES as NAMES
from tests.gpu_sim.drives.decoding import graphs_recorded, static_generator
from tests.gpu_sim.drives.parts import Case, Engine, classifier, language_model, one_rank
from tests.gpu_sim.fake_cuda import CUDA, FakeCuda

TOKENS = 40  # of a text
CHARACTERS = "abcdefghijklmnopqrstuvwxyz"


def reward_model(device: FakeCuda, family: str, forwards: int) -> None:
    """Scores texts with token types in ``forwards`` forwards of two texts each."""
    module = ScoreModel(classifier(family)).eval().requires_grad_(False)
    texts = [EncodedText([7] * (TOKENS - i % 2), [0] * (TOKENS - i % 2)) for i in range(2 * forwards)]
    with one_rank(device) as world:
        reward = ModelReward(
            FrozenModel(module, module, CUDA),
            encoder=None,
            tokenizer=None,
            pad_id=0,
            token_budget=2 * TOKENS,
            all_reduce_max=world.max_int,
            key="reward",
            name="the reward model",
        )
        device.report.clear()
        assert reward.score(texts).device.type == "cpu"


def evaluation(device: FakeCuda, rows: int) -> None:
    """Generates responses of 32 tokens to two batches of ``rows`` prompts, and scores them with a model."""
    tokenizer, limit = character_tokenizer(CHARACTERS), 32
    lm, module = language_model("qwen2").eval(), ScoreModel(classifier("roberta")).eval()
    prompts = Prompts(
        ids=torch.full((rows, 3), 5),
        mask=torch.ones(rows, 3, dtype=torch.bool),
        limits=torch.full((rows,), limit),
        metadata=({"prompt_text": "ccc"},) * rows,
    )
    with one_rank(device) as world, graphs_recorded(device, limit):
        reward = ModelReward(
            FrozenModel(module, module, CUDA),
            encoder=TextEncoder(tokenizer, "concat", None, None, "reward", actors_vocabulary=True),
            tokenizer=tokenizer,
            pad_id=0,
            token_budget=10_000,
            all_reduce_max=world.max_int,
            key="reward",
            name="the reward model",
        )
        evaluate = Evaluator(
            [(prompts, torch.ones(rows))] * 2,
            actor=Engine(lm, world),
            generator=static_generator(lm, tokenizer, slots=rows, longest=3 + limit),
            start_scoring=reward.start_scoring,
            more_scoring={},
            sampling=SamplingParams(limit, 0, 1.0, 1.0, 1, (), ()),
            correct_above=None,
            reference=None,
            tokenizer=tokenizer,
            world=world,
            check=lambda: None,
        )
        device.report.clear()
        assert len(evaluate().rows) == 2 * rows


def case(name: str) -> Case:
    *what, number, _ = name.split(" ")
    if what[0] == "evaluation":
        return partial(evaluation, rows=int(number))
    return partial(reward_model, family=what[0], forwards=int(number))


CASES = {name: case(name) for name in NAMES["scoring"]}
