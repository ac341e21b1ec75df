"""PPO runs with the engine of vLLM: its log-probs stay those of the trainer, resuming, learning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_presets import metrics
from tests.support.environment import ROOT
from tests.support.ranks import RankServer
from tests.vllm.conftest import SUMS
from tests.vllm.runs_worker import remove_shared_memory

pytestmark = pytest.mark.slow

STEPS = 4
PATIENCE = 900
# metrics that may differ between equal runs
CHANGING = ("time", "perf/", "mem/", "health/rank_time_spread_s")
ZERO_3 = (
    "zero=stage3",
    "actor.deepspeed={zero_optimization: {stage3_param_persistence_threshold: 0}}",
    "critic.deepspeed={zero_optimization: {stage3_param_persistence_threshold: 0}}",
)
LORA = ("actor.lora.rank=4", "actor.lora.lr=1e-2")
ONE_RANK = {
    "untied": (),
    "tied": ("actor.model.path={start}/tied",),
    "lora": LORA,
    "lora_nf4": (*LORA, "actor.model.quantization=nf4"),
    "temperature": ("sampling.temperature=0.7",),
}
TWO_RANKS = {
    "zero3": ZERO_3,
    "zero3_lora": (*ZERO_3, *LORA),
    "zero3_tied": (*ZERO_3, "actor.model.path={start}/tied"),
}
# A process has engines of one tensor-parallel size only.
TENSOR_PARALLEL = {
    "zero2": ("rollout.vllm.tensor_parallel=2",),
    "zero3": (*ZERO_3, "rollout.vllm.tensor_parallel=2"),
}


def arguments(start: Path, run_dir: Path, *more: str) -> list[str]:
    """Returns the arguments of a short run whose large learning rate changes all weights at each step."""
    paths = (
        f"prepare.dir={start}",
        f"actor.model.path={start}/model",
        f"data.path={start}/train.jsonl",
        f"data.eval_path={start}/heldout.jsonl",
    )
    size = (
        f"run.steps={STEPS}",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=2",
        "eval.every=null",
        "checkpoint.every=0",
        "algo.minibatch_size=8",
        "actor.optim.warmup_steps=0",
        "actor.optim.lr=3e-3",
        "run.threads=1",
        # nearly all scores differ, so that every step changes the policy
        "reward=function",
        f"reward.path={ROOT}/tests/integration/digits.py:score",
    )
    task = [f"prepare.{name}={value}" for name, value in SUMS.items()]
    how = [argument.format(start=start) if "{start}" in argument else argument for argument in more]
    return [
        "+experiment=quickstart",
        f"run.dir={run_dir}",
        *paths,
        *task,
        *size,
        "rollout.backend=vllm",
        *how,
    ]


def run_all(server: RankServer, root: Path, ranks: int, cases: dict[str, list[str]]) -> None:
    """Runs the cases one after the other in one process group."""
    remove_shared_memory()  # of ranks that were killed
    (root / "cases.json").write_text(json.dumps(cases))
    codes, text = server.run("tests.vllm.runs_worker:main", ranks, str(root / "cases.json"), limit=PATIENCE)
    assert codes == [0] * ranks, text[-6000:]


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [(1, ONE_RANK), (2, TWO_RANKS), (2, TENSOR_PARALLEL)],
    ids=["one_rank", "two_ranks", "tensor_parallel"],
)
def test_the_engine_decodes_with_the_trained_weights(
    start: Path, tmp_path: Path, rank_server: RankServer, ranks: int, ways: dict[str, tuple[str, ...]]
) -> None:
    """Before and after three steps that change the policy, its log-probs are the trainer's up to 1e-5."""
    run_all(rank_server, tmp_path, ranks, {way: arguments(start, tmp_path / way, *ways[way]) for way in ways})
    sent: list[float] = []
    for way in ways:
        lines = metrics(tmp_path / way)
        gaps = [line["parity/logp_abs_diff_max"] for line in lines]
        assert len(gaps) == STEPS and max(gaps) < 1e-5, (way, gaps)
        sent.append(lines[0]["perf/switch_gb"])  # with LoRA only the adapters: the base was sent before
        assert "lora" not in way or 0 < sent[-1] < 0.2 * sent[0], (way, sent)
        drift = [line["kl/k3_token_mean"] for line in lines]
        assert drift[0] < 1e-6 and min(drift[1:]) > 1e-4, (way, drift)


def test_a_resumed_run_draws_the_same(start: Path, tmp_path: Path, rank_server: RankServer) -> None:
    stop = ("checkpoint.every=2", "run.stop_at_step=2")
    again = (f"run.resume={tmp_path}/stopped/checkpoints/step_000002",)
    whole = arguments(start, tmp_path / "whole", "tracker.samples=-1")
    run_all(
        rank_server,
        tmp_path,
        1,
        {
            "whole": whole,
            "stopped": arguments(start, tmp_path / "stopped", *stop),
            "resumed": arguments(start, tmp_path / "resumed", "tracker.samples=-1", *again),
        },
    )
    steady = [
        [{name: line[name] for name in line if not name.startswith(CHANGING)} for line in metrics(folder)]
        for folder in (tmp_path / "whole", tmp_path / "resumed")
    ]
    assert steady[0][2:] == steady[1] and len(steady[1]) == 2
    for step in (3, 4):
        texts = [
            (tmp_path / name / f"samples/step_{step:06d}.jsonl").read_text() for name in ("whole", "resumed")
        ]
        assert texts[0] == texts[1]


def test_a_run_learns(installed: None, tmp_path: Path, rank_server: RankServer) -> None:
    """The quickstart with vLLM: the greedy accuracy on held-out sums rises by 5 points in twelve steps."""
    case = ["+experiment=quickstart", f"run.dir={tmp_path / 'learns'}", "rollout.backend=vllm"]
    case += ["prepare.heads=3", "run.steps=12", "run.threads=1"]  # three heads of size 32
    run_all(rank_server, tmp_path, 1, {"learns": case})
    summary = json.loads((tmp_path / "learns" / "summary.json").read_text())
    before, after = (summary[f"heldout_accuracy_{when}"] for when in ("before", "after"))
    assert after > before + 0.05, (before, after)
