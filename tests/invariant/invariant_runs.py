"""Runs invariant_worker.py with a list of cases, and reads the results of each of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.invariant import invariant_assets
from tests.support.ranks import RankServer

PATIENCE = 1500  # seconds per launch; a case that hangs ends itself long before
# metrics that may differ between equal runs
UNCOMPARED = ("time/", "perf/", "mem/", "health/rank_time_spread_s")
ASSETS = "ASSETS"  # placeholder in a case for the folder of the models and prompts
NOT_PERSISTENT = {
    "zero_optimization": {"stage3_param_persistence_threshold": 0}
}  # so that tiny weights are sharded too
Case = dict[str, Any]


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merges ``over`` into ``base``, dict by dict.

    A dict with another ``_target_`` replaces the old dict completely.
    """
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict) and "_target_" not in value
        out[key] = merged(out[key], value) if both else value
    return out


def base() -> dict[str, Any]:
    """Returns a config of 3 PPO steps x 2 epochs x 2 minibatches = 12 optimizer steps in micro-batches.

    Adam's eps is not 1e-8: its first step moves a weight by lr g / (|g| + eps), so that a gradient of 2e-9
    (one in 30,000 is that small) would turn its own rounding of 3e-10 into a move of 1e-5. With 1e-6 the move
    is 1e-7, and the other gradients, which are about 1e-3, are not affected.
    """
    optim = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}
    return {
        "run": {"steps": 3, "seed": 1, "resume": "never", "timeout_minutes": 2, "threads": 1},
        "actor": {"model": {"path": f"{ASSETS}/actor", "dtype": "fp32"}, "optim": optim},
        "critic": {"init": "path", "model": {"path": f"{ASSETS}/scorer"}, "optim": optim},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 2},
        "sampling": {"max_new_tokens": 10, "stop_token_ids": invariant_assets.STOPS},
        "data": {"path": f"{ASSETS}/prompts.jsonl"},
        "algo": {"epochs": 2, "minibatch_size": 8, "kl": {"coef": 0.1}, "entropy": {"coef": 0.01}},
        "memory": {"rollout_tokens": 200, "score_tokens": 150, "train_tokens": 100},
        "checkpoint": {"every": 0},
        "tracker": {"samples": -1, "sample_tokens": 10},
        "reward": {
            "_target_": "ppo_ds.rewards.function.FunctionReward",
            "path": f"{invariant_assets.__file__}:score",
        },
    }


def staged(stage: int, dtype: str = "fp32", reference: int | None = None, **zero: bool) -> dict[str, Any]:
    """Returns a config with actor and critic on one ZeRO stage; the reference is sharded or not."""
    raw = NOT_PERSISTENT if stage == 3 else {}
    role = {"zero": {"stage": stage, **zero}, "deepspeed": raw}
    reference = (3 if stage == 3 else 0) if reference is None else reference
    return {
        "actor": merged(role, {"model": {"dtype": dtype}}),
        "critic": role,
        "reference": {"zero": {"stage": reference}},
    }


def case(label: str, *overlays: dict[str, Any], **switches: str) -> Case:
    """Returns one case.

    ``switches`` are generate=record|replay|sample and mistake=..., see invariant_worker.py. A run
    that replays rollouts has no bound on the parity, because its policy may differ from the one that decoded
    them. Old log-probs come from training, whose numbers are compared.
    """
    replays = switches.get("generate", "replay") == "replay"
    config: dict[str, Any] = {"algo": {"old_logprobs": "recompute"}}
    config |= {"health": {"max_parity": None}} if replays else {}
    for overlay in overlays:
        config = merged(config, overlay)
    return {"label": label, "config": config, **switches}


@dataclass(frozen=True)
class Run:
    """Reads the results of one case."""

    folder: Path

    @cached_property
    def metrics(self) -> str:
        """The lines of metrics.jsonl."""
        return (self.folder / "metrics.jsonl").read_text()

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """Returns the metrics of each PPO step, without those that may differ between equal runs."""
        return [
            {k: v for k, v in json.loads(line).items() if k != "time" and not k.startswith(UNCOMPARED)}
            for line in self.metrics.splitlines()
        ]

    @cached_property
    def found(self) -> dict[str, Any]:
        return json.loads((self.folder / "found.json").read_text())

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "tensors.safetensors")

    def weights(self, role: str) -> dict[str, Tensor]:
        return {
            name.partition("/")[2]: x.float()
            for name, x in self.tensors.items()
            if name.startswith(f"{role}/")
        }

    def experience(self, when: str) -> dict[str, Tensor]:
        """Returns the experience of the "first" or "last" step, as ``when`` says."""
        return {name.partition("/")[2]: x for name, x in self.tensors.items() if name.startswith(f"{when}/")}

    def samples(self, step: int) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.folder / f"samples/step_{step:06d}.jsonl").read_text().splitlines()
        ]


@dataclass
class Launches:
    """Launches the cases; ``launches["2/zero3"]`` is the Run of case "zero3" on 2 ranks."""

    root: Path
    server: RankServer
    runs: dict[str, Run] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Run:
        return self.runs[name]

    def launch(self, ranks: int, cases: list[Case], name: str | None = None, function: str = "main") -> None:
        """Runs ``function`` of the worker with ``cases``."""
        name = name or str(ranks)
        configured = [entry | {"config": merged(base(), entry["config"])} for entry in cases]
        (self.root / f"{name}.json").write_text(json.dumps(configured).replace(f"{ASSETS}/", f"{self.root}/"))
        self.server.check(
            f"tests.invariant.invariant_worker:{function}", ranks, str(self.root), name, limit=PATIENCE
        )
        self.runs |= {f"{name}/{entry['label']}": Run(self.root / name / entry["label"]) for entry in cases}
