"""Creates a pipeline of SFT, reward model and PPO on small sums that takes a minute, and runs its command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from ppo_ds.models import tiny
from tests.support.environment import ROOT, environment

PIPELINE = str(ROOT / "launch" / "pipeline.py")
LIMIT = 900.0  # seconds until a hang fails the test
STAGES = ("sft", "reward_model", "ppo")

FILE = """
stages:
  sft:
    arguments:
      - +experiment=sft
      - actor.model.path=DATA/base
      - actor.model.dtype=fp32
      - data.path=DATA/demonstrations.jsonl
      - data.eval_path=DATA/held_out.jsonl
      - sft.batch_size=16
      - sft.max_tokens=32
      - sft.samples=2
      - sft.sample_tokens=4
      - actor.optim.lr=1.0e-3
      - run.epochs=null
      - run.steps=16
  reward_model:
    arguments:
      - +experiment=reward_model
      - scorer.model.path=${stages.sft.run.dir}/model
      - scorer.model.dtype=fp32
      - data.path=DATA/pairs.jsonl
      - reward_model.batch_size=16
      - reward_model.max_tokens=32
      - scorer.optim.lr=1.0e-3
      - run.epochs=null
      - run.steps=16
  ppo:
    arguments:
      - actor.model.path=${stages.sft.run.dir}/model
      - actor.model.dtype=fp32
      - reward=model
      - reward.model.path=${stages.reward_model.run.dir}/model
      - reward.model.dtype=fp32
      - data.path=DATA/prompts.jsonl
      - data.eval_path=DATA/held_out.jsonl
      - data.max_prompt_tokens=16
      - rollout.prompts_per_step=16
      - algo.minibatch_size=8
      - sampling.max_new_tokens=4
      - actor.optim.lr=1.0e-4
      - critic.optim.lr=1.0e-4
      - run.steps=10
evaluation:
  models:
    base: ${stages.sft.actor.model.path}
    sft: ${stages.sft.run.dir}/model
    ppo: ${stages.ppo.run.dir}/model
  judge: [reward=exact_match, reward.column=response]
"""


def make(folder: Path) -> None:
    """Writes the base model, the data and conf/pipeline/sums.yaml to ``folder``."""
    tokenizer = tiny.character_tokenizer("0123456789+= ")
    torch.manual_seed(0)
    model = tiny.tiny_llama(tokenizer, hidden_size=16, layers=1, heads=2, max_tokens=64)
    tiny.save(model, tokenizer, folder / "base")
    sums = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in sums]
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums]
    for name, content in (
        ("demonstrations", rows[:80]), ("pairs", pairs[:80]), ("prompts", rows[:80]), ("held_out", rows[80:]),
    ):  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "conf" / "pipeline").mkdir(parents=True)
    (folder / "conf" / "pipeline" / "sums.yaml").write_text(FILE.replace("DATA", str(folder)))


def start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts the pipeline in a session of its own; its output is appended to ``NAME.log``."""
    command = [sys.executable, PIPELINE, "+pipeline=sums", "--config-dir", "conf", f"run.name={name}"]
    return subprocess.Popen(
        [*command, "checkpoint.every=2", "ranks=1", *arguments],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=(folder / f"{name}.log").open("a"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def run(folder: Path, name: str, *arguments: str) -> int:
    """Runs the pipeline to its end and returns its exit code."""
    process = start(folder, name, *arguments)
    try:
        return process.wait(LIMIT)
    finally:
        kill_session(process.pid)


def kill_session(session: int) -> list[int]:
    """Kills every process of a session, as the end of a container does; returns the process ids."""
    killed = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(of) == session and state not in "ZX":
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
    return killed


def wait_until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
