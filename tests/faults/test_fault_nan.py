"""Tests that a NaN on one of two ranks causes only its own optimizer step to be skipped.

The step is skipped on all ranks and for both models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_ds.tracking.jsonl import read_metrics
from tests.faults.nan_worker import BAD, CASES, ENGINES
from tests.invariant import invariant_assets
from tests.support.forked import Ranks
from tests.support.ranks import RankServer
from tests.support.run_files import tensors

REPLAY = Path(__file__).parents[2] / "launch" / "replay.py"
PATIENCE = 900  # seconds until a hang fails the test; a hanging case prints its stacks long before
UNKNOWN_TOKEN = 2  # id in the tiny tokenizer of characters outside its alphabet


# -- one NaN ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worked(root: Path, rank_server: RankServer) -> Path:
    rank_server.check("tests.faults.nan_worker:main", 2, str(root), limit=PATIENCE)
    return root


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that are not bit-identical."""
    assert a.keys() == b.keys() and len(a) > 20
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_nan_is_as_if_the_minibatch_had_not_been(worked: Path, case: str) -> None:
    faulted, left_out = worked / case / "faulted", worked / case / "left_out"
    assert differing(tensors(faulted), tensors(left_out)) == []
    assert all(tensor.isfinite().all() for tensor in tensors(faulted).values())
    assert (
        len(differing(tensors(faulted), tensors(worked / case / "run" / "checkpoints" / "step_000001"))) > 100
    )  # training has changed the weights
    for role in ("actor", "critic"):
        ours, theirs = (
            json.loads((folder / role / "model.json").read_text()) for folder in (faulted, left_out)
        )
        assert ours["steps"] == theirs["steps"] == 7 and set(ours["adam_steps"].values()) == set(
            theirs["adam_steps"].values()
        ) == {7}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_both_ranks_and_both_models_say_the_same_of_it(worked: Path, case: str) -> None:
    (first, second), other = json.loads((worked / case / "faulted" / "said.json").read_text())
    assert [first["health/skipped_steps"], second["health/skipped_steps"]] == [1.0, 0.0]
    assert (
        first["policy/grad_norm"] != first["policy/grad_norm"]
        and first["value/grad_norm"] != first["value/grad_norm"]
    )  # NaN: the norm of a skipped step is unknown
    assert second["policy/grad_norm"] == other[1]["policy/grad_norm"] > 0 and second == other[1]
    clean = json.loads((worked / case / "left_out" / "said.json").read_text())[0][1]
    assert second == clean


@pytest.mark.slow
def test_without_the_guard_every_weight_would_be_nan(worked: Path) -> None:
    """Runs the negative control, in fp32 without ZeRO, where DeepSpeed itself does not check."""
    weights = [
        tensor
        for name, tensor in tensors(worked / "zero0" / "unguarded").items()
        if name.startswith("actor/weight/")
    ]
    assert len(weights) == 21 and all(tensor.isnan().all() for tensor in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_goes_on_after_a_nan_and_after_a_step_that_was_dropped(worked: Path, name: str) -> None:
    found = json.loads((worked / "engines.json").read_text())[name]
    for way in ("nan", "dropped"):
        skipped, scales, steps = zip(*found[way]["said"], strict=True)
        assert list(skipped) == [step == BAD for step in range(6)] and list(steps) == [1, 2, 2, 3, 4, 5]
        assert found[way]["same"], way
        if "fp16" in name:  # only an overflow lowers the scale
            assert list(scales) == ([64.0] * 2 + [32.0] * 4 if way == "nan" else [64.0] * 6)


# -- whole runs ------------------------------------------------------------------------------------


def command(root: Path, name: str, *more: str) -> list[str]:
    """Returns the arguments of a run of three steps, with two optimizer steps each.

    Each optimizer step has one micro-batch on each rank, and a checkpoint is saved after each step.
    """
    return [
        f"run.dir={root / name}", "run.steps=3", "run.seed=1", "run.timeout_minutes=2",
        f"actor.model.path={root / 'actor'}",
        "actor.model.dtype=fp32", "actor.optim.lr=1e-3", "critic.optim.lr=1e-3", "critic.init=path",
        f"critic.model.path={root / 'scorer'}",
        "rollout.prompts_per_step=8", "sampling.max_new_tokens=8", "sampling.stop_token_ids=[1,3,4]",
        f"data.path={root / 'prompts.jsonl'}",
        "algo.epochs=1", "algo.minibatch_size=4", "algo.reward_shaping.normalize=running",
        "algo.old_logprobs=recompute", "checkpoint.every=1", "checkpoint.keep_last=9",
        "reward=function", f"reward.path={invariant_assets.__file__}:score", "health.max_skips=2", *more,
    ]  # fmt: skip


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


def errors(output: str) -> list[str]:
    assert "Traceback" not in output, output
    return [line for line in output.splitlines() if line.startswith("error:")]


def test_a_rollout_with_a_bad_score_or_log_prob_is_left_out_and_poisons_nothing(
    root: Path, ranks: Ranks
) -> None:
    nan = "score:rank=1:at=2 logprob:rank=0:at=3"
    codes, output = ranks.run(
        2, command(root, "left out", "run.steps=4", "health.max_skips=3", "health.max_kl=1e-9"), NAN=nan
    )
    assert codes == [0, 0] and errors(output) == [], output
    found = read_metrics(root / "left out" / "metrics.jsonl")
    assert [line["health/skipped_steps"] for line in found] == [0.0, 2.0, 2.0, 0.0]
    assert [line["health/nonfinite"] > 0 for line in found] == [False, True, True, False]
    assert (
        found[1]["reward/score_mean"] is None
        and found[1]["policy/loss"] is None
        and found[1]["kl/k3_token_mean"] is not None
    )
    assert found[2]["reward/score_mean"] is not None and found[2]["kl/k3_token_mean"] is None
    assert (
        "step 2: 2 optimizer step(s) skipped, not finite: score" in output
        and "not finite: log-prob of token 0" in output
    )
    assert (
        output.count("is above health.max_kl") == 2
    )  # after the first update, and again after a step with an unknown KL
    # The policy did not change in between: in the remaining rollouts, the policy of step 4 is as far from the
    # reference as the policy of step 2.
    before, after = (root / "left out" / "checkpoints" / f"step_00000{step}" for step in (1, 4))
    # no checkpoint is saved while steps are being skipped
    assert checkpoints(root / "left out") == [before.name, after.name]
    state = json.loads((after / "state.json").read_text())["state"]
    assert state["scores"]["count"] == 24 and all(
        value == value for value in state["scores"].values()
    )  # eight scores of each of four rollouts
    assert all(tensor.isfinite().all() for tensor in tensors(after).values())
    assert len(differing(tensors(before / "actor"), tensors(after / "actor"))) > 50
    assert json.loads((after / "actor" / "model.json").read_text())["steps"] == 4


# -- data with non-finite gradients ------------------------------------------------------------------------


def overflowing(root: Path) -> Path:
    """Returns a finite actor whose gradient norms overflow in every row with an unknown token."""
    folder = root / "overflowing"
    folder.mkdir()
    for file in (root / "actor").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with safe_open(root / "actor" / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    weights["model.embed_tokens.weight"][UNKNOWN_TOKEN] = 3e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_data_that_break_the_model_are_named_and_replayed(root: Path, ranks: Ranks) -> None:
    """Injects no fault: the data gives one row a non-finite gradient, on every machine."""
    prompts = [*invariant_assets.PROMPTS[:7], "kid#nap"]
    (root / "broken.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    more = (
        f"actor.model.path={overflowing(root)}",
        f"data.path={root / 'broken.jsonl'}",
        "algo.minibatch_size=8",
        "health.max_skips=1",
    )
    codes, output = ranks.run(2, command(root, "data", *more))
    assert codes == [1, 1], output
    (line,) = errors(output)
    dump = root / "data" / "dumps" / "step_000001"
    about = json.loads((dump / "update.json").read_text())
    broken = (
        (load_file(dump / "update.safetensors")["ids"] == UNKNOWN_TOKEN).any(dim=1).nonzero()[:, 0].tolist()
    )
    assert about["what"].startswith("gradient of actor.lm.model.layers.1.") and about["place"] == broken[0], (
        line
    )
    assert about["what"] in line and repr(about["rows"][broken[0]]["prompt"]) in line

    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(REPLAY), str(dump)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("row ")]
    assert (
        len(rows) == 8
        and [i for i, row in enumerate(rows) if "first non-finite tensor: -" not in row] == broken
    )
    numbers = [row["row_of_the_rollout"] for row in about["rows"]]
    assert [int(row.split()[1]) for row in rows] == numbers and sorted(numbers) == list(range(8))
    assert f"in row {numbers[broken[0]]} of the rollout" in line
    assert f"first non-finite tensor: {about['what']}, row {numbers[broken[0]]} of the rollout" in done.stdout
    assert (
        f"in the run: {about['what']} (rank {about['rank']}, row {numbers[broken[0]]} of the rollout)"
        in done.stdout
    )
