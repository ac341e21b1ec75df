"""Runs TRL's PPOTrainer or GRPOTrainer for equal_learning.py, in a separate environment.

    TRL_ENV/bin/python benchmarks/equal_learning_trl.py RUN/settings.json

The script imports nothing from ppo_ds. It saves the policy and the seconds of training every few steps.
Settings that are not in the file are TRL's defaults, except for those that only change speed or output.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace


def main(argv: list[str]) -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch

    settings = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        build = ppo_trainer if settings["algorithm"] == "ppo" else grpo_trainer
        clock = make_clock(settings)
        trainer = build(settings, scratch, clock)
        taken = count_steps(trainer, settings)
        trainer.train()
    due = settings["steps"] * settings["epochs"]
    assert taken[0] == due, f"{taken[0]} optimizer steps, not {due}"
    (Path(settings["run_dir"]) / "clock.json").write_text(
        json.dumps({"times": clock.times, "machine": versions()}, indent=1) + "\n"
    )


def common(settings: dict, scratch: str) -> dict:
    """Returns the training arguments that both trainers have."""
    return {
        "output_dir": scratch,
        "use_cpu": True,
        "seed": settings["seed"],
        "per_device_train_batch_size": settings["prompts"] * settings["samples"],
        "gradient_accumulation_steps": 1,
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta1": settings["betas"][0],
        "adam_beta2": settings["betas"][1],
        "adam_epsilon": settings["eps"],
        "temperature": 1.0,
        # none of these changes the result
        "gradient_checkpointing": False,
        "bf16": settings["dtype"] == "bf16",  # autocast, with fp32 weights
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
    }


def ppo_arguments(settings: dict, scratch: str) -> dict:
    """Returns the arguments of TRL's PPOConfig."""
    return common(settings, scratch) | {
        "total_episodes": settings["prompts"] * settings["samples"] * settings["steps"],
        "num_ppo_epochs": settings["epochs"],
        "num_mini_batches": 1,
        "kl_coef": settings["kl_coef"],
        "response_length": settings["new_tokens"],
        "stop_token": "eos",
        "local_rollout_forward_batch_size": settings["prompts"] * settings["samples"],
        "num_sample_generations": 0,
    }


def grpo_arguments(settings: dict, scratch: str) -> dict:
    """Returns the arguments of TRL's GRPOConfig."""
    return common(settings, scratch) | {
        "max_steps": settings["steps"],
        "max_grad_norm": settings["grad_clip"],
        "num_generations": settings["samples"],
        "num_iterations": settings["epochs"],
        "max_completion_length": settings["new_tokens"],
        "beta": settings["kl_coef"],
        "loss_type": "grpo",  # the mean over responses of the mean over tokens, as in the paper of GRPO
        "use_bias_correction_kl": False,  # the KL of the paper
    }


def ppo_trainer(settings: dict, scratch: str, clock):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    start, tokenizer = Path(settings["folder"]), load_tokenizer(settings)
    prompts = [row["prompt"] for row in rows(settings) for _ in range(settings["samples"])]
    return PPOTrainer(
        args=PPOConfig(**ppo_arguments(settings, scratch)),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(start / "model"),
        ref_model=AutoModelForCausalLM.from_pretrained(start / "model"),
        reward_model=reward_model(tokenizer),
        value_model=AutoModelForSequenceClassification.from_pretrained(start / "critic", num_labels=1),
        train_dataset=Dataset.from_dict(
            {"input_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts]}
        ),
        callbacks=[clock],
    )


def grpo_trainer(settings: dict, scratch: str, clock):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    def reward(prompts, completions, answer, **_others):
        stated = str.strip if settings["reward"] == "sums" else last_number
        return [
            float(stated(text) == stated(expected))
            for text, expected in zip(completions, answer, strict=True)
        ]

    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(Path(settings["folder"]) / "model"),
        reward_funcs=reward,
        args=GRPOConfig(**grpo_arguments(settings, scratch)),
        processing_class=load_tokenizer(settings),
        train_dataset=Dataset.from_list(rows(settings)),
        callbacks=[clock],
    )


def load_tokenizer(settings: dict):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(settings["folder"]) / "model", padding_side="left")


def rows(settings: dict) -> list[dict]:
    lines = (Path(settings["folder"]) / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def score(text: str) -> float:
    """Returns 1 if the text, "12+34=46", has the correct answer after the first "=", else 0."""
    problem, _, response = text.partition("=")
    return float(response.strip() == str(sum(map(int, problem.split("+")))))


def last_number(text: str) -> int | None:
    """Returns the last whole number of a text."""
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None


def reward_model(tokenizer):
    """Makes a module that PPOTrainer can call as a reward model, and that computes ``score``.

    PPOTrainer calls the backbone, whose attribute is named by ``base_model_prefix``, passes its last hidden
    states through ``score``, and reads the result at the last token of the response.
    """
    import torch

    class Backbone(torch.nn.Module):
        def forward(self, input_ids, attention_mask, **_others):
            kept = [ids[mask].tolist() for ids, mask in zip(input_ids, attention_mask.bool(), strict=True)]
            texts = tokenizer.batch_decode(kept, skip_special_tokens=True)
            scores = torch.tensor([score(text) for text in texts])
            return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

    class Reward(torch.nn.Module):
        base_model_prefix = "model"

        def __init__(self):
            super().__init__()
            self.model, self.score = Backbone(), torch.nn.Identity()

    return Reward()


def make_clock(settings: dict):
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Saves the policy, and the seconds of training without those of saving."""

        def __init__(self):
            self.times: list[dict] = []
            self.mark = (0.0, 0.0)  # start of training, moved by the time of saving

        def on_train_begin(self, *_args, **_kwargs):
            self.mark = (time.perf_counter(), time.process_time())

        def on_step_end(self, args, state, control, model=None, **_kwargs):
            step = state.global_step
            if step % settings["save_every"] == 0:
                before = (time.perf_counter(), time.process_time())
                seconds, cpu_seconds = (now - start for now, start in zip(before, self.mark, strict=True))
                self.times.append({"step": step, "seconds": seconds, "cpu_seconds": cpu_seconds})
                save(model.policy if settings["algorithm"] == "ppo" else model, step, settings)
                after = (time.perf_counter(), time.process_time())
                self.mark = tuple(m + a - b for m, a, b in zip(self.mark, after, before, strict=True))

    return Clock()


def save(policy, step: int, settings: dict) -> None:
    from safetensors.torch import save_file

    weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    save_file(weights, Path(settings["run_dir"]) / f"step_{step}.safetensors")


def count_steps(trainer, settings: dict) -> list[int]:
    """Returns a list whose only element counts the optimizer steps."""
    count = [0]

    def after(*_args):
        count[0] += 1

    if trainer.optimizer is None:  # GRPOTrainer would create it later
        trainer.create_optimizer_and_scheduler(settings["steps"] * settings["epochs"])
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    optimizer.register_step_post_hook(after)
    return count


def versions() -> dict:
    import torch
    import transformers
    import trl

    found = {"trl": trl, "torch": torch, "transformers": transformers}
    return {"versions": {name: module.__version__ for name, module in found.items()}}


if __name__ == "__main__":
    main(sys.argv[1:])
