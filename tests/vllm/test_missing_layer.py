"""A layer that the engine ignores stops the run in the first step that it affects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_ds.examples.sums import prepare_stages
from tests.integration.test_presets import metrics
from tests.support.environment import ROOT
from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with problems and a model whose distribution is far from uniform."""
    folder = tmp_path_factory.mktemp("start")
    sizes = dict(min_operand=0, max_operand=9, heldout=8, pairs=4, heldout_pairs=4, hidden_size=64, heads=2)
    prepare_stages(str(folder), seed=0, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder / "model")
    return folder


def run(server: RankServer, start: Path, folder: Path, when: str) -> tuple[int, list[str]]:
    """Returns the exit code of a run of two steps and the lines of its output that report a gap."""
    codes, output = server.run(
        "tests.vllm.missing_layer_worker:main",
        1,
        when,
        "+experiment=quickstart",
        "prepare=null",
        f"run.dir={folder}",
        f"actor.model.path={start}/model",
        f"data.path={start}/train.jsonl",
        "data.eval_path=null",
        "eval.every=null",
        "eval.train_prompts=0",
        "rollout.backend=vllm",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=2",
        "algo.minibatch_size=8",
        "run.steps=2",
        "run.threads=1",
        "checkpoint.every=0",
        "actor.optim.warmup_steps=0",
        "actor.optim.lr=3e-3",
        "reward=function",
        f"reward.path={ROOT}/tests/integration/digits.py:score",
    )
    assert "Traceback" not in output, output[-6000:]
    return codes[0], [line for line in output.splitlines() if re.search("disagree|health.max_parity=", line)]


def test_a_layer_that_is_always_ignored_stops_the_run_before_its_first_step(
    rank_server: RankServer, start: Path, tmp_path: Path
) -> None:
    code, lines = run(rank_server, start, tmp_path, "always")
    assert code == 2 and not (tmp_path / "metrics.jsonl").exists()
    (line,) = lines
    assert "generation and training disagree" in line and "rollout.backend=vllm" in line


def test_a_layer_that_is_ignored_later_stops_the_run_in_the_first_step_after_an_update(
    rank_server: RankServer, start: Path, tmp_path: Path
) -> None:
    code, lines = run(rank_server, start, tmp_path, "later")
    assert code == 1 and [line["step"] for line in metrics(tmp_path)] == [1]
    (line,) = lines
    assert "step 2: parity/logp_abs_diff_mean=" in line and "stale weights" in line
