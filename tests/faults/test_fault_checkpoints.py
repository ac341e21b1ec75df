"""Tests kills and full disks around checkpoints: a resumed run equals an undisturbed one bit for bit.

The tests run the real program on two ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppo_ds.tracking.jsonl import read_metrics
from tests.invariant import invariant_assets
from tests.support.forked import Ranks, Run
from tests.support.ranks import RankServer
from tests.support.run_files import UNCOMPARED
from tests.support.run_files import compared as metrics

pytestmark = pytest.mark.slow

STEPS = 11
NOISY = '''
"""Draws from every generator that a reward may use.

A generator that is missing from a checkpoint changes the scores.
"""
import random
import numpy, torch

def score(prompts, responses, rows):
    return [
        len(set(r)) + 0.1 * (random.gauss(0, 1) + float(numpy.random.normal()) + float(torch.randn(())))
        for r in responses
    ]
'''


class Lab:
    """Holds tiny models and prompts, and the ranks that train them."""

    def __init__(self, root: Path, ranks: Ranks | None):
        self.root, self.ranks = root, ranks
        invariant_assets.make(root)
        self._spoil_with_dropout(root / "actor" / "config.json")
        (root / "noisy.py").write_text(NOISY)

    @staticmethod
    def _spoil_with_dropout(file: Path) -> None:
        """Sets a dropout in the config file, as in many published models; training must disable it."""
        file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.5}))

    def arguments(self, run: str, *more: str) -> list[str]:
        root = self.root
        given = dict(argument.split("=", 1) for argument in more)
        base = {
            "run.dir": root / run,
            "run.steps": STEPS,
            "run.seed": 1,
            "run.timeout_minutes": 2,
            "run.threads": 1,
            "actor.model.path": root / "actor",
            "actor.model.dtype": "fp32",
            "actor.optim.lr": 1e-3,
            "critic.init": "path",
            "critic.model.path": root / "scorer",
            "critic.optim.lr": 1e-3,
            "rollout.prompts_per_step": 8,
            "sampling.max_new_tokens": 6,
            "sampling.stop_token_ids": "[1,3,4]",
            "data.path": root / "prompts.jsonl",
            "algo.epochs": 1,
            "algo.minibatch_size": 4,
            "checkpoint.every": 1,
            "tracker.samples": 1,
            "reward.path": f"{root / 'noisy.py'}:score",
        }
        return ["reward=function", *(f"{key}={value}" for key, value in {**base, **given}.items())]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults"), Ranks(rank_server))


# All parts with a state besides models: an evaluation that samples, a best checkpoint, an average policy, a
# normalised reward, a KL controller.
WHOLE = ("data.eval_path=DATA", "eval.every=4", "eval.max_prompts=2", "eval.greedy=false",
         "checkpoint.keep_best=true", "algo.reward_shaping.normalize=running", "algo.kl.controller=adaptive",
         "algo.kl.target=0.5", "algo.kl.horizon=40", "actor.ema.decay=0.9")  # fmt: skip


def whole(lab: Lab, run: str, *more: str) -> list[str]:
    return lab.arguments(
        run, *(argument.replace("DATA", str(lab.root / "prompts.jsonl")) for argument in WHOLE), *more
    )


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> Path:
    codes, output = lab.ranks.run(2, whole(lab, "undisturbed"))
    assert codes == [0, 0], output
    return lab.root / "undisturbed"


def steps(run: Path) -> list[int]:
    return [line["step"] for line in metrics(run)]


def content(checkpoint: Path) -> dict[str, Any]:
    """Returns the SHA-256 of every file; of state.json without the settings, which contain the folder."""
    files = {str(file.relative_to(checkpoint)): file for file in checkpoint.rglob("*") if file.is_file()}
    state = json.loads(files.pop("state.json").read_text())
    del files["manifest.json"], state["settings"]
    return {
        **{name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()},
        "state.json": without_times(state),
    }


def without_times(tree: Any) -> Any:
    return (
        {k: without_times(v) for k, v in tree.items() if not UNCOMPARED.match(k)}
        if isinstance(tree, dict)
        else tree
    )


def assert_equal_ends(run: Path, other: Path, step: int = STEPS) -> None:
    """Compares the final states, every metric of every step, and the exports.

    The states are weights, moments, random states, counters and controllers after the last step.
    """
    assert content(run / "checkpoints" / f"step_{step:06d}") == content(
        other / "checkpoints" / f"step_{step:06d}"
    )
    assert metrics(run) == metrics(other)
    assert (run / "model" / "model.safetensors").read_bytes() == (
        other / "model" / "model.safetensors"
    ).read_bytes()


def names(run: Path) -> list[str]:
    """Returns the checkpoint folders in order, the leftovers of a save, and the targets of the pointers."""
    found = sorted(re.sub("_[0-9a-f]{16}$", "", path.name) for path in (run / "checkpoints").iterdir())
    pointers = [
        f"{name} -> {int((run / 'checkpoints' / name).read_text()[5:])}"
        for name in ("best", "latest")
        if name in found
    ]
    return [
        str(int(name[5:])) if name.startswith("step_") else name
        for name in found
        if name not in ("best", "latest")
    ] + pointers


def resumed_after(output: str) -> int:
    found = re.search(r"resumed\s+after step (\d+)", output)
    return int(found[1]) if found else 0


SLOW_AND_KILLED = "slow@checkpoint.write:rank=1:seconds=3 kill@checkpoint.write:rank=0"
# fault, checkpoint that the next start resumes from, steps in metrics.jsonl and content of the folder after
# the fault
BLOWS = [
    ("kill@checkpoint.before:at=2", 0, 2, ["1", "latest -> 1"]),
    ("kill@checkpoint.after_actor", 1, 2, [".tmp_step_000002", "1", "latest -> 1"]),
    ("kill@checkpoint.before_rename", 1, 2, [".tmp_step_000002", "1", "latest -> 1"]),
    ("kill@checkpoint.after_rename", 1, 2, ["1", "2", "latest -> 1"]),
    (SLOW_AND_KILLED, 2, 3, [".tmp_step_000003", "1", "2", "latest -> 1"]),
    ("kill@checkpoint.before_prune:at=2", 2, 4, ["2", "3", "4", "best -> 4", "latest -> 4"]),
    ("full@checkpoint.write:rank=1", 4, 5, ["3", "4", "best -> 4", "latest -> 4"]),
]


def test_kills_and_a_full_disk_at_every_place_of_a_save_change_nothing(lab: Lab, undisturbed: Path) -> None:
    run = lab.root / "struck"
    for fault, start, step, left in BLOWS:
        codes, output = lab.ranks.run(2, whole(lab, "struck"), fault=fault)
        assert codes == [1, 1] if "full@" in fault else was_killed(codes), (fault, codes, output)
        assert resumed_after(output) == start, (fault, output)
        assert steps(run) == list(range(1, step + 1)), fault
        assert names(run) == left, fault
        if "full@" in fault:
            errors = [line for line in output.splitlines() if "error: " in line.lower()]
            assert (
                len(errors) == 1
                and errors[0].startswith("error: ")
                and "step_000005 was not written" in errors[0]
            ), output
            assert "rank 1: [Errno 28] No space left on device" in errors[0] and "Traceback" not in output, (
                output
            )
    codes, output = lab.ranks.run(2, whole(lab, "struck"))
    assert codes == [0, 0] and resumed_after(output) == 4, output
    assert_equal_ends(run, undisturbed)
    assert names(run) == names(undisturbed)


def test_four_random_kills_end_in_the_same_bits(lab: Lab, undisturbed: Path) -> None:
    """Kills one rank or both at random moments in generation, learning or a save.

    Each kill comes after the first or second step that its start has made.
    """
    run, chance = lab.root / "killed", random.Random(7)
    for i in range(4):
        aim, record = newest(run) + 1 + i % 2, identity(run)
        started = lab.ranks.start(2, whole(lab, "killed"))
        wait_for(lambda: identity(run) != record and steps(run)[-1:] >= [aim], started)  # noqa: B023
        time.sleep(chance.uniform(0, read_metrics(run / "metrics.jsonl")[-1]["time/step"]))
        for pid in chance.choice([started.pids, started.pids[:1], started.pids[1:]]):
            os.kill(pid, signal.SIGKILL)
        assert was_killed(lab.ranks.wait(started)), started.output()
        done = steps(run)
        assert done == list(range(1, len(done) + 1)) and len(done) in (newest(run), newest(run) + 1), (
            newest(run),
            done,
        )
        assert len(done) < STEPS, "the run was over before it could be killed"
    codes, output = lab.ranks.run(2, whole(lab, "killed"))
    assert codes == [0, 0] and resumed_after(output) > 0, output
    assert_equal_ends(run, undisturbed)


def was_killed(codes: list[int]) -> bool:
    """Returns whether the kill ended the run; a rank that was not killed may have ended itself."""
    return -signal.SIGKILL in codes and 0 not in codes


def newest(run: Path) -> int:
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step_*")), default=0)


def identity(run: Path) -> int | None:
    """Returns the inode of the metrics file, or None if there is none.

    Each start replaces the file by one without the steps that are repeated.
    """
    file = run / "metrics.jsonl"
    return file.stat().st_ino if file.exists() else None


def wait_for(condition: Callable[[], bool], started: Run) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, started.output()
        time.sleep(0.01)


# -- what is refused -------------------------------------------------------------------------------


def refusal(lab: Lab, arguments: list[str]) -> str:
    """Starts two ranks, which must end with exit code 2, and returns their only error line."""
    codes, output = lab.ranks.run(2, arguments)
    assert codes == [2, 2] and "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if "error: " in line]
    return line


def test_what_cannot_be_continued_is_refused_in_a_line_before_anything_is_loaded_or_written(lab: Lab) -> None:
    model = shutil.copytree(lab.root / "actor", lab.root / "lost")
    settings = partial(lab.arguments, "refused", "run.steps=2", f"actor.model.path={model}")
    codes, output = lab.ranks.run(1, settings())
    assert codes == [0], output
    (model / "model.safetensors").unlink()  # any attempt to load the model would report the missing file
    run = lab.root / "refused"
    written, (first, second) = (run / "config.yaml").read_text(), sorted((run / "checkpoints").glob("step_*"))

    line = refusal(lab, settings("actor.zero.stage=1"))
    assert (
        "actor.zero.stage=1" in line
        and f"{second} was made with 2" in line
        and "run.resume_allow_changes=[actor.zero.stage]" in line
    )
    (second / "actor" / "shard-00000.safetensors").write_bytes(b"")
    line = refusal(lab, settings(f"run.resume={second}"))
    assert f"run.resume: {second} is damaged: actor/shard-00000.safetensors has 0 bytes" in line
    (first / "state.json").unlink()
    line = refusal(lab, settings())
    assert "run.resume=auto: all checkpoints in" in line and "step_000001 (state.json is missing)" in line
    assert (run / "config.yaml").read_text() == written and steps(run) == [1, 2]


# -- k steps, a stop, and the rest -----------------------------------------------------------------

SHORT, STOPPED = 6, 3
SHARDED = tuple(
    f"{role}.deepspeed.zero_optimization.stage3_param_persistence_threshold=0" for role in ("actor", "critic")
)
LAGGED = ("algo.old_policy=lagged", "algo.lag=3", "algo.ptx.coef=0.5", "algo.ptx.batch_size=2",
          "data.ptx_path=TEXTS", "data.path=null",
          "data.mix=[{path:DATA,weight:2},{path:OTHERS}]")  # fmt: skip
GROUPS = ("algo.advantage.estimator=grpo", "algo.advantage.whiten=none", "rollout.samples_per_prompt=2",
          "algo.dynamic_sampling.enabled=true", "algo.dynamic_sampling.max_rounds=2", "critic.init=auto",
          "critic.model.path=null")  # fmt: skip
LORA = ("actor.lora.rank=4", "critic.lora.rank=4")
EVERYWHERE = [
    (ranks, stage, dtype) for ranks in (1, 2) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")
]
# Additional settings of some cases. The cases listed here run in every test run, the others overnight.
MORE = {
    (1, 0, "fp32"): LAGGED,
    (1, 1, "bf16"): (*WHOLE, f"eval.every={STOPPED}"),
    (2, 1, "fp32"): GROUPS,
    (2, 2, "bf16"): LORA,
    (2, 3, "bf16"): (*SHARDED, *LAGGED),
}
OVER_NIGHT = [case for case in EVERYWHERE if case not in MORE]


def short(lab: Lab, run: str, stage: int, dtype: str, *more: str) -> list[str]:
    files = {"DATA": "prompts.jsonl", "OTHERS": "others.jsonl", "TEXTS": "texts.jsonl"}
    for name, file in files.items():
        more = tuple(argument.replace(name, str(lab.root / file)) for argument in more)
    size = (
        f"run.steps={SHORT}",
        f"checkpoint.every={STOPPED}",
        f"actor.zero.stage={stage}",
        f"critic.zero.stage={stage}",
    )
    return lab.arguments(run, *size, f"actor.model.dtype={dtype}", "reference.model.dtype=fp32", *more)


def together(lab: Lab, started: list[Run]) -> None:
    for run in started:
        assert set(lab.ranks.wait(run)) == {0}, run.output()


def assert_goes_on(lab: Lab, cases: list[tuple[int, int, str]]) -> None:
    """Compares each uninterrupted run with one that is stopped and then resumed by the same command.

    On one rank, all uninterrupted runs start at once, and so do all stopped and all resumed runs.
    """
    (lab.root / "others.jsonl").write_text(
        "".join(
            json.dumps({"prompt": prompt}) + "\n"
            for prompt in ("dab", "cafe", "joke", "pima", "hen", "gap", "nil", "oak")
        )
    )
    (lab.root / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("abcd", "bead", "chief", "lemon", "gold"))
    )
    for overrides in ([], [f"run.stop_at_step={STOPPED}"], [f"run.stop_at_step={SHORT}"]):
        names = ["whole" if not overrides else "parts"] * len(cases)
        commands = [
            short(lab, f"{name} {case}", *case[1:], *MORE.get(case, SHARDED), *overrides)
            for name, case in zip(names, cases, strict=True)
        ]
        for at_once in [commands] if cases[0][0] == 1 else [[command] for command in commands]:
            together(lab, [lab.ranks.start(cases[0][0], command) for command in at_once])
    for case in cases:
        parts, whole_run = lab.root / f"parts {case}", lab.root / f"whole {case}"
        assert [line["step"] for line in metrics(parts)] == list(range(1, SHORT + 1))
        assert_equal_ends(parts, whole_run, SHORT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_run_goes_on_to_the_same_bits(lab: Lab, ranks: int) -> None:
    assert_goes_on(lab, [case for case in MORE if case[0] == ranks])


@pytest.mark.nightly
@pytest.mark.parametrize("case", OVER_NIGHT, ids=str)
def test_a_stopped_run_goes_on_to_the_same_bits_everywhere(lab: Lab, case: tuple[int, int, str]) -> None:
    assert_goes_on(lab, [case])
