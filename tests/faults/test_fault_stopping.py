"""Tests signals to any process of a run, and launchers that are killed.

All ranks end together and soon, and the next start continues to the results of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launching import LAUNCHERS
from tests.invariant import invariant_assets
from tests.support.environment import environment
from tests.support.forked import Ranks
from tests.support.ports import reserved_port
from tests.support.run_files import compared as lines

WORKER = Path(__file__).with_name("fault_stopping_worker.py")
PATIENCE = 300.0  # seconds until a hang fails the test; a launch takes 5 s to start on an idle machine
# Seconds from a signal to the end of the last process. An idle machine needs 3 s; without messages between
# the ranks it would need 90 s.
SOON = 60.0

# -- launchers and ranks without models ------------------------------------------------------------

GROUP, COMMAND, CHILD = "the group", "the command", "the child launcher"
CASES = [  # launcher, receiver, signal
    ("deepspeed", GROUP, signal.SIGINT),  # Ctrl-C
    ("deepspeed", COMMAND, signal.SIGKILL),
    ("deepspeed", CHILD, signal.SIGTERM),
    ("deepspeed", GROUP, signal.SIGUSR1),  # as sent by SLURM; the launchers are set to ignore it
    ("torchrun", COMMAND, signal.SIGKILL),  # kills torchrun's agent, which also hosts the store
]


@dataclass
class Outcome:
    told: list[bool]  # for each rank, whether it received the stop request
    seconds: float  # from the signal to the end of the last process
    output: str


def marked(mark: str) -> list[int]:
    """Returns the ids of all processes with the mark in their environment, whatever their parent is."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # the process has ended meanwhile, or belongs to another user
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def launched(case: tuple[str, str, signal.Signals], folder: Path) -> Outcome:
    launcher, whom, number = case
    folder.mkdir()
    mark, log = f"stopping_{uuid.uuid4().hex}", folder / "log"
    port = ["--master_port", str(reserved_port())] if launcher == "deepspeed" else []
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                "bash",
                "-c",
                "trap '' USR1; exec \"$@\"",
                "bash",
                *LAUNCHERS[launcher],
                *port,
                str(WORKER),
                str(folder),
            ],
            cwd=folder,
            env=environment() | {"MARK": mark, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(
            lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)) or process.poll() is not None,
            f"{case}: no start",
        )
        assert process.poll() is None, log.read_text()
        if whom == GROUP:
            os.killpg(process.pid, number)
        else:
            _, parent, *_ = json.loads((folder / "ready0").read_text())
            os.kill(process.pid if whom == COMMAND else parent, number)
        sent = time.monotonic()
        wait_for(
            lambda: process.poll() is not None and not marked(mark),
            f"{case}: {marked(mark)} are left\n{log.read_text()}",
            2 * SOON,
        )
        told = [
            json.loads(file.read_text()) if file.exists() else False
            for file in (folder / "left0", folder / "left1")
        ]
        return Outcome(told, time.monotonic() - sent, log.read_text())
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple, Any]]:
    """Launches two cases at a time, because imports take most of the time of a launch."""
    root = tmp_path_factory.mktemp("launched")
    with ThreadPoolExecutor(2) as pool:
        yield {case: pool.submit(launched, case, root / str(i)) for i, case in enumerate(CASES)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2].name} to {case[1]} of {case[0]}")
def test_all_ranks_hear_of_it_and_nobody_is_left(outcomes: dict[tuple, Any], case: tuple) -> None:
    outcome = outcomes[case].result()
    assert outcome.told == [True, True] and outcome.seconds < SOON, outcome.output
    assert f'{WORKER.name}", line' not in outcome.output, (
        outcome.output
    )  # launchers print tracebacks of signals themselves


# -- the trainer -----------------------------------------------------------------------------------

REWARD = """
import os, signal

calls = 0


def score(prompts, responses, rows):
    \"\"\"Rewards "e" and "i".

    STOP="FAULT=N" gives rank 1 that fault after its N-th call; "here" is a signal in that call.
    \"\"\"
    global calls
    calls += 1
    fault, _, call = os.environ.get("STOP", "").rpartition("=")
    if fault and os.environ["RANK"] == "1" and calls == int(call):
        if fault == "here":
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            os.environ["PPO_DS_FAULT"] = fault
    return [
        0.5 * sum(map(response.count, "ei")) - 0.1 * abs(len(prompt) - len(response))
        for prompt, response in zip(prompts, responses)
    ]
"""
IN_GENERATION = "stop@generate.step:at=3"


def arguments(root: Path, name: str, *more: str) -> list[str]:
    """Returns the arguments of a run of four steps with every part that has a state.

    The parts are an adaptive controller, a normaliser, dropout-free models, and an evaluation after every
    second step.
    """
    return [
        f"run.dir={root / name}", "run.steps=4", f"actor.model.path={root / 'actor'}",
        "actor.model.dtype=fp32", "actor.zero.stage=2", "critic.zero.stage=1",
        f"data.path={root / 'prompts.jsonl'}", f"data.eval_path={root / 'prompts.jsonl'}",
        "eval.every=2", "eval.max_prompts=4", "reward=function",
        f"reward.path={root / 'reward.py'}:score", "rollout.prompts_per_step=8",
        "sampling.max_new_tokens=10", f"sampling.stop_token_ids={invariant_assets.STOPS}",
        "algo.minibatch_size=4", "algo.kl.controller=adaptive", "algo.reward_shaping.normalize=running",
        "checkpoint.every=null", "checkpoint.keep_last=9", *more,
    ]  # fmt: skip


def latest(run_dir: Path) -> int:
    return int((run_dir / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))


def files(run_dir: Path, step: int) -> dict[str, str]:
    """Returns the size and SHA-256 of all tensors of a checkpoint: weights, moments, random states."""
    manifest = json.loads((run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json").read_text())
    return {name: entry for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


def reason(run_dir: Path) -> str:
    return json.loads((run_dir / "summary.json").read_text())["exit_reason"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stopping")
    invariant_assets.make(root)
    (root / "reward.py").write_text(REWARD)
    return root


@pytest.fixture(scope="module")
def undisturbed(root: Path, ranks: Ranks) -> Path:
    codes, output = ranks.run(2, arguments(root, "undisturbed"))
    assert codes == [0, 0], output
    return root / "undisturbed"


def test_stopped_in_every_phase_it_ends_with_the_weights_of_an_undisturbed_run(
    root: Path, ranks: Ranks, undisturbed: Path
) -> None:
    run_dir, told = root / "stopped", []
    for stop in (
        f"{IN_GENERATION}=2",  # in the second step; the evaluation before the training makes the first call
        "here=2",  # in the reward of the evaluation after the second step, the first part of this start
        "here=2",  # in the reward of the third step, after the evaluation that was interrupted
        "stop@update=1",  # in the update of the third step
        "",
    ):
        codes, output = ranks.run(2, arguments(root, "stopped"), STOP=stop)
        assert codes == ([143, 143] if stop else [0, 0]), output
        told.append(
            (reason(run_dir), latest(run_dir), len(lines(run_dir)), "eval/score_mean" in lines(run_dir)[-1])
        )
    assert told == [
        ("signal", 1, 1, False),
        ("signal", 2, 2, False),
        ("signal", 2, 2, True),
        ("signal", 3, 3, False),
        ("done", 4, 4, True),
    ]
    assert lines(run_dir) == lines(undisturbed)
    assert files(run_dir, 4) == files(undisturbed, 4)


@pytest.mark.slow
def test_with_zero_3_layer_by_layer_ranks_leave_generation_in_step(root: Path, ranks: Ranks) -> None:
    how = (
        "actor.zero.stage=3", "actor.zero.generation_gather=layers", "rollout.backend=hf",
        "eval.every=null", "data.eval_path=null", "eval.train_prompts=0", "run.steps=2",
        "actor.deepspeed.zero_optimization.stage3_param_persistence_threshold=0",
    )  # fmt: skip
    assert ranks.run(2, arguments(root, "whole", *how))[0] == [0, 0]
    codes, output = ranks.run(2, arguments(root, "layers", *how), STOP=f"{IN_GENERATION}=1")
    assert codes == [143, 143] and latest(root / "layers") == 1, output
    assert ranks.run(2, arguments(root, "layers", *how))[0] == [0, 0]
    assert files(root / "layers", 2) == files(root / "whole", 2) and lines(root / "layers") == lines(
        root / "whole"
    )


@pytest.mark.slow
def test_a_rank_that_waits_for_another_which_decodes_has_it_stop(root: Path, ranks: Ranks) -> None:
    """Sends SIGTERM to rank 0 twice while rank 1 decodes.

    Rank 1 would need minutes to decode its answers to the second step's prompts.
    """
    run_dir = root / "waiting"
    how = (
        "sampling.max_new_tokens=30", "sampling.min_new_tokens=30", "data.eval_path=null", "eval.every=null",
        "eval.train_prompts=0",  # so that the first step makes the first call of the reward
    )  # fmt: skip
    run = ranks.start(2, arguments(root, "waiting", *how), STOP="slow@generate.step:times=0:seconds=4=1")
    try:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and lines(run_dir), "no first step")
        time.sleep(1)
        for _ in range(2):
            os.kill(run.pids[0], signal.SIGTERM)
            time.sleep(0.5)
        sent = time.monotonic()
        codes = ranks.wait(run)
    finally:
        for pid in run.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert codes == [143, 143] and time.monotonic() - sent < SOON, run.output()
    assert reason(run_dir) == "signal" and latest(run_dir) == len(lines(run_dir)) == 1
