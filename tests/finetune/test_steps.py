"""Tests one step of the stages before PPO, without an engine: gradients, metrics and the dump of a NaN."""

import math
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.assemble.reward_model import describe_pairs
from ppo_ds.finetune import sft
from ppo_ds.finetune.optimizer_step import OptimizerStep
from ppo_ds.finetune.pair_scores import PairScores
from ppo_ds.run.health import Health
from ppo_ds.run.stage import StepContext
from ppo_ds.types import Sequences
from tests.finetune.test_sft_loss import trainer
from tests.ppo.algo_cases import timer
from tests.ppo.conftest import ThreadWorld
from tests.ppo.learner_cases import Engine, TinyPolicy, V

WORLD = ThreadWorld(0, 1, threading.Barrier(1), [None])
# rows of 4, 3 and 2 tokens, of which 2, 1 and 1 are learned
MASK = torch.arange(4) < torch.tensor([4, 3, 2])[:, None]
LEARNED = torch.tensor([[0, 1, 1], [0, 1, 0], [1, 0, 0]]).bool()
ROWS = Sequences(torch.arange(12).view(3, 4) % V, MASK, LEARNED)


def test_only_the_last_micro_batch_ends_the_accumulation_of_gradients():
    actor = Engine(TinyPolicy(V, 1), WORLD)
    step = OptimizerStep(
        context=StepContext(world=WORLD, timer=timer, health=Health(2)),
        name="actor", prefix="sft", model=actor, ema=None, ema_decay=0.0, capacity=None, cost=None,
    )  # fmt: skip

    def loss(row):
        micro = ROWS.select(torch.tensor([row]))
        return -actor(micro.ids, micro.attention_mask, micro.response_width).logprobs.sum(), {}

    step(ROWS, [0, 1, 2], loss)  # the engine refuses a backward after the last one
    assert actor.backwards == [3]


def test_the_share_of_learned_tokens():
    stage = trainer(SimpleNamespace(packed=False))
    stage.context = SimpleNamespace(
        world=WORLD,
        timer=timer,
        stop=SimpleNamespace(raise_if_stopped=lambda: None),
        budgets=SimpleNamespace(train=None, ending=lambda *_: nullcontext()),
    )
    stage.train_tokens, stage.rows, stage.update = 100, Stream(), Update()
    metrics = stage.step(0).metrics
    assert (metrics["sft/tokens"], metrics["sft/learned_frac"]) == (4, pytest.approx(4 / 9))


class Update:
    def performance(self, *_, **__):
        return {}

    def __call__(self, *_):
        return {}


class Stream:
    epoch = 0.0
    source = SimpleNamespace(location=lambda number: f"data.jsonl:{number}")

    def __next__(self):
        return ROWS

    def indices(self, step):
        return [10 * step + i for i in range(len(ROWS))]


def test_the_dump_of_a_nan_names_the_rows_of_its_step(monkeypatch, tmp_path):
    stage, written = trainer(SimpleNamespace(packed=False)), {}
    stage.context.world = WORLD
    stage.rows, stage.tokenizer = Stream(), SimpleNamespace(decode=lambda ids, **_: str(ids))
    stage.update = SimpleNamespace(name="actor", model=stage.actor)
    monkeypatch.setattr(sft, "replay_rows", lambda *_: None)
    monkeypatch.setattr(sft, "dump_failure", lambda *_, **parts: written.update(parts))
    skip = SimpleNamespace(batch=ROWS, what=("loss.actor",))
    stage.dump_failure(SimpleNamespace(last_skip=skip), 3, tmp_path)
    assert [row["location"] for row in written["rows"]] == [f"data.jsonl:{n}" for n in (20, 21, 22)]
    assert [row["prompt"] for row in written["rows"]] == ["[0, 1, 2, 3]", "[4, 5, 6]", "[8, 9]"]


def test_the_calibration_has_ten_bins_of_confidence():
    """Pairs with the confidences 0.52, 0.57, 0.98 and 0.99; the second is ranked wrongly."""
    differences = [math.log(p / (1 - p)) for p in (0.52, 0.57, 0.98, 0.99)]
    differences[1] *= -1
    scores = torch.tensor([[d, 0.0] for d in differences])
    found = PairScores(scores, torch.ones(4, 2), [None] * 4).calibration()
    assert [(round(confidence, 3), right, n) for confidence, right, n in found] == [
        (0.52, 1.0, 1), (0.57, 0.0, 1), (0.985, 1.0, 2),
    ]  # fmt: skip


def test_the_banner_says_how_many_pairs_are_left_out():
    class Source(list):
        report = {"rows": 7, "pairs": 6, "tied": 2, "identical": 0, "dropped": 1, "unknown": 0}

    assert describe_pairs(Source(range(3))) == (
        "7 rows, 6 pairs, 2 tied, 1 longer than reward_model.max_tokens; 3 used"
    )
    Source.report = {"rows": 3, "pairs": 3, "tied": 0, "identical": 0, "dropped": 0, "unknown": 0}
    assert describe_pairs(Source(range(3))) == "3 rows, 3 pairs; all used"
