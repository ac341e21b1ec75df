"""Runs this trainer for equal_learning.py: python benchmarks/equal_learning_ours.py RUN/settings.json

It runs the trainer like launch/train.py, and saves the policy and the seconds of training every few steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]


def main(argv: list[str]) -> None:
    from launch.cli import load_config
    from launch.process import complain, exit_now, prepare_environment
    from ppo_ds.assemble.run import build_run
    from ppo_ds.errors import UserError

    settings = json.loads(Path(argv[0]).read_text())
    try:
        config = load_config(overrides(settings))
        prepare_environment(config.run.verbose, trains=True)
        run = build_run(config)
        clock = Clock(run.stage, settings)
        run.fit()
    except UserError as error:
        exit_now(complain(error))
    (Path(settings["run_dir"]) / "clock.json").write_text(
        json.dumps({"times": clock.times, "machine": versions()}, indent=1) + "\n"
    )
    exit_now(0)


def overrides(settings: dict[str, Any]) -> list[str]:
    """Returns the overrides of the run, as on the command line of launch/train.py."""
    start, betas = Path(settings["folder"]), ",".join(map(str, settings["betas"]))
    keys = {
        "run.name": "equal_learning",
        "run.dir": Path(settings["run_dir"]) / "run",
        "run.resume": "restart",
        "run.seed": settings["seed"],
        "run.steps": settings["steps"],
        "run.threads": 1,
        "zero": "stage0",
        "reward": settings["reward"],
        "actor.model.path": start / "model",
        "actor.model.dtype": settings["dtype"],
        "data.path": start / "train.jsonl",
        "data.apply_chat_template": False,
        "data.max_prompt_tokens": 128,
        "rollout.prompts_per_step": settings["prompts"],
        "rollout.samples_per_prompt": settings["samples"],
        "sampling.max_new_tokens": settings["new_tokens"],
        "algo.epochs": settings["epochs"],
        "algo.kl.coef": settings["kl_coef"],
        "checkpoint.every": 0,
        "eval.train_prompts": 0,
        "tracker.samples": 0,
    }
    if settings["reward"] == "numeric":
        keys |= {"reward.column": "answer", "memory.train_tokens": 4096}  # 5 GB, beside other programs
    if settings["algorithm"] == "ppo":
        keys |= {"algo": "trl", "critic.init": "path", "critic.model.path": start / "critic"}
    else:
        keys["algo"] = "grpo"
    for model in ("actor", "critic") if settings["algorithm"] == "ppo" else ("actor",):
        keys |= {
            f"{model}.optim.lr": settings["lr"],
            f"{model}.optim.betas": f"[{betas}]",
            f"{model}.optim.eps": settings["eps"],
            f"{model}.optim.schedule": "constant",
            f"{model}.optim.warmup_steps": 0,
            f"{model}.optim.grad_clip": settings["grad_clip"],
        }
    return [f"{key}={value}" for key, value in keys.items()]


class Clock:
    """Wraps a trainer's ``step``; saves the policy, and the seconds of training without those of saving."""

    def __init__(self, stage: Any, settings: dict[str, Any]):
        self.settings, self.stage, self.step = settings, stage, stage.step
        self.times: list[dict[str, float]] = []
        self.mark: tuple[float, float] | None = None  # start of training, moved by the time of saving
        stage.step = self

    def __call__(self, index: int) -> Any:
        if self.mark is None:
            self.mark = (time.perf_counter(), time.process_time())
        result = self.step(index)
        if (index + 1) % self.settings["save_every"] == 0:
            before = (time.perf_counter(), time.process_time())
            seconds, cpu_seconds = (now - start for now, start in zip(before, self.mark, strict=True))
            self.times.append({"step": index + 1, "seconds": seconds, "cpu_seconds": cpu_seconds})
            self.save(index + 1)
            after = (time.perf_counter(), time.process_time())
            self.mark = tuple(m + a - b for m, a, b in zip(self.mark, after, before, strict=True))
        return result

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        weights = {name: t.detach().clone() for name, t in self.stage.actor.module.lm.state_dict().items()}
        save_file(weights, Path(self.settings["run_dir"]) / f"step_{step}.safetensors")


def versions() -> dict[str, Any]:
    import deepspeed
    import torch
    import transformers

    found = {"torch": torch, "transformers": transformers, "deepspeed": deepspeed}
    return {"versions": {name: module.__version__ for name, module in found.items()}}


if __name__ == "__main__":
    main(sys.argv[1:])
