"""Runs many small trainings, one after the other, in one process group.

Its arguments are ROOT and NAME; it reads the cases from ``ROOT/NAME.json``, each of the form {"label",
"config", and switches}. The results of a case are in ``ROOT/NAME/<label>``: metrics.jsonl, samples/, model/
and critic/ of the run itself, and found.json and tensors.safetensors with the observations of rank 0.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_ds.assemble.run import build_run
from ppo_ds.background.pending import Pending
from ppo_ds.config.validation import validated
from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.ppo.minibatches import all_gather_rows
from ppo_ds.ppo.trainer import PPOTrainer
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import Experience, Metrics, Prompts, Rollout, Scores
from tests.invariant.mistakes import made
from tests.support.collectives import read_calls, record_collectives, unrecorded

HANG = 300  # seconds after which a hanging case prints its stacks and exits
Case = dict[str, Any]
Found = dict[str, Any]


class Recorder:
    """Records every rollout, with the rows of all ranks, for replay in other runs."""

    def __init__(self, trainer: PPOTrainer, file: Path):
        self.world, self.generate, self.file = trainer.context.world, trainer.collect.generator, file
        self.tensors: dict[str, Tensor] = {}
        self.calls = 0

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        rollout = self.generate(prompts, sampling)
        everything = all_gather_rows(rollout, self.world)
        self.tensors |= {f"{self.calls}/{name}": column for name, column in everything.tensors().items()}
        self.calls += 1
        if self.world.is_main:
            save_file({name: x.contiguous() for name, x in self.tensors.items()}, self.file)
        return rollout


class Replayer:
    """Gives each rank its part of the recorded rollouts, cut to its own widths.

    The prompts must be the recorded prompts. The first ``calls`` rollouts are left out.
    """

    def __init__(self, trainer: PPOTrainer, file: Path, calls: int = 0):
        self.world, self.tensors = trainer.context.world, load_file(file)
        self.calls = calls

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        columns = {
            name.partition("/")[2]: x for name, x in self.tensors.items() if name.startswith(f"{self.calls}/")
        }
        self.calls += 1
        mine = {name: x.chunk(self.world.size)[self.world.rank] for name, x in columns.items()}
        rollout = Rollout(**mine, metadata=prompts.metadata).trimmed()
        for i in range(len(prompts)):
            recorded, given = rollout.ids[i, : rollout.prompt_width], prompts.ids[i]
            kept = rollout.attention_mask[i, : rollout.prompt_width]
            assert recorded[kept].tolist() == given[prompts.mask[i]].tolist(), (
                f"another prompt than the recorded one in row {i}"
            )
        return rollout


def watch_steps(model: TrainedModel) -> list[float]:
    """Returns a list to which the gradient norm of each optimizer step of ``model`` is appended."""
    norms: list[float] = []
    step = model.step

    def watched() -> Any:
        info = step()
        norms.append(info.grad_norm)
        return info

    model.step = watched
    return norms


def watch_experience(trainer: PPOTrainer) -> list[Experience]:
    found: list[Experience] = []
    make = trainer.make_experience

    def watched(
        rollout: Rollout, scores: Pending[Scores], kl_coef: float, critic_only: bool
    ) -> tuple[Experience, Metrics]:
        experience, seen = make(rollout, scores, kl_coef, critic_only)
        found.append(experience)
        return experience, seen

    watched.measure_kl = make.measure_kl
    trainer.make_experience = watched
    return found


def count_layer_runs(trainer: PPOTrainer) -> dict[str, int]:
    """Counts how often the first layer of each trained model runs with gradients.

    A checkpointed layer runs a second time in each backward pass.
    """
    counted = dict.fromkeys(trainer.models, 0)

    def counter(role: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counted[role] += torch.is_grad_enabled()

        return count

    for role, model in trainer.models.items():
        whole = model.module.lm if role == "actor" else model.module.model
        whole.model.layers[0].input_layernorm.register_forward_hook(counter(role))
    return counted


def count_forwards(trainer: PPOTrainer) -> list[int]:
    """Returns a one-element list with the number of decoding forwards so far."""
    counted = [0]

    def count(*_: Any) -> None:
        counted[0] += trainer.actor._depth > 0

    lm = trainer.actor.module.lm if trainer.actor._copy is None else trainer.actor._copy
    lm.register_forward_hook(count)
    return counted


@torch.no_grad()
def views_of_the_actor(trainer: PPOTrainer, experience: Experience) -> dict[str, Tensor]:
    """Evaluates the trained models on the last rollout.

    The engines give log-probs and values of all states; the decoding model gives logits.
    """
    ids, mask = experience.ids, experience.attention_mask
    with trainer.actor.generation_mode():
        logits = trainer.actor.lm(
            input_ids=ids, attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits
    out = trainer.actor(ids, mask, experience.response_width)
    critic = trainer.learn.critic
    values = out.values if critic is None else critic(ids, mask, experience.response_width)
    seen = {"trained_logprobs": out.logprobs, "trained_logits": logits.float()}
    return seen if values is None else seen | {"trained_values": values}


def rotary(trainer: PPOTrainer) -> Found:
    """Returns the RoPE frequencies of all models, which must not be rounded with any dtype or sharding."""
    reference = trainer.make_experience.forwards.reference.module
    lms = {"actor": trainer.actor.module.lm, "reference": reference.lm}
    if trainer.actor._copy is not None:
        lms["twin"] = trainer.actor._copy
    buffers = {name: lm.model.rotary_emb.inv_freq for name, lm in lms.items()}
    return {name: {"dtype": str(buffer.dtype), "values": buffer.tolist()} for name, buffer in buffers.items()}


def set_generator(trainer: PPOTrainer, how: str, file: Path, step: int) -> None:
    """Replaces the generator of a run that has made ``step`` steps, unless it is to sample."""
    if how == "record":
        trainer.collect.generator = Recorder(trainer, file)
    elif how == "replay":
        trainer.collect.generator = Replayer(trainer, file, calls=step)


def run(case: Case, root: Path, out: Path) -> None:
    config = validated(case["config"], int(os.environ["WORLD_SIZE"]))
    training = build_run(config)
    world, trainer = training.world, training.stage
    found: Found = {"rotary": rotary(trainer)}
    norms = {role: watch_steps(model) for role, model in trainer.models.items()}
    experiences = watch_experience(trainer)
    forwards, layer_runs = count_forwards(trainer), count_layer_runs(trainer)
    rollouts, step = root / case.get("rollouts", "rollouts.safetensors"), training.saver.state.step
    set_generator(trainer, case.get("generate", "replay"), rollouts, step)
    with made(case.get("mistake")):
        found["reason"] = training.fit()
    assert found["reason"] in ("done", "stop_at_step"), found["reason"]  # no run is compared in part
    found |= {"norms": norms, "layer_runs": layer_runs, "forwards": world.gather_objects(forwards[0])}
    tensors = views_of_the_actor(trainer, experiences[-1])
    for role, model in trainer.models.items():
        weights = consolidated(model) or {}
        tensors |= {f"{role}/{name}": weight.clone() for name, weight in weights.items()}
    for when, experience in (("first", experiences[0]), ("last", experiences[-1])):
        tensors |= {f"{when}/{name}": column.clone() for name, column in experience.tensors().items()}
    if world.is_main:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, out / "tensors.safetensors"
        )
        (out / "found.json").write_text(json.dumps(found))
    for model in trainer.models.values():
        model.engine.destroy()


def record_and_run() -> None:
    """Runs ``main`` and records the collectives of each rank in ``ROOT/NAME/rank<rank>.jsonl``."""
    folder = Path(sys.argv[1]) / sys.argv[2]
    folder.mkdir(exist_ok=True)
    file = folder / f"rank{os.environ['RANK']}.jsonl"
    record_collectives(file)
    main(before_closing=lambda: check_complete(file))


def check_complete(file: Path) -> None:
    missing = unrecorded(read_calls(file))
    assert not missing, f"collectives without a record, by ranks: {missing}"


def main(before_closing: Callable[[], None] = lambda: None) -> None:
    root, name = Path(sys.argv[1]), sys.argv[2]
    for case in json.loads((root / f"{name}.json").read_text()):
        faulthandler.dump_traceback_later(HANG, exit=True)
        out = root / name / case["label"]
        case["config"]["run"]["dir"] = str(out)
        print("==", case["label"], flush=True)
        run(case, root, out)
        gc.collect()
        faulthandler.cancel_dump_traceback_later()
    before_closing()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
