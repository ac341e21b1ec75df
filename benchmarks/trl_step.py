"""Runs PPO steps of TRL's experimental PPOTrainer on a prepared folder, in a separate environment.

See docs/dev/performance.md. The script imports nothing from ppo_ds. Its settings are the fastest that TRL
offers for this work: the largest rollout batch, no gradient checkpointing, no sample generations, no
saving. TRL's accelerator accumulates gradients over the micro-batches of a whole rollout, or steps at every
micro-batch if the data set holds only one rollout. The script sets the accumulation to the micro-batches of
one minibatch, so that both trainers make the same optimizer steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="model/, reward/ and prompts.jsonl")
    parser.add_argument(
        "--steps", type=int, required=True, help="measured steps, after one that is not measured"
    )
    for name in (
        "prompts",
        "new-tokens",
        "max-prompt-tokens",
        "epochs",
        "minibatches",
        "micro-rows",
        "rollout-rows",
        "threads",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--stop", action="store_true", help="the tokenizer's end token ends a response")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parsed(argv)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch
    from transformers import TrainerCallback
    from trl.experimental.ppo import ppo_trainer

    torch.set_num_threads(args.threads)

    class Clock(TrainerCallback):
        """Records wall-clock and CPU seconds at the end of each step."""

        ends: list[tuple[float, float]] = []

        def on_step_end(self, *_args, **_kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            Clock.ends.append((time.perf_counter(), time.process_time()))

    with tempfile.TemporaryDirectory() as scratch:
        trainer = build(ppo_trainer.PPOTrainer, args, scratch, Clock())
        lengths = watch_lengths(ppo_trainer, trainer.stop_token_id)  # stop_token_id is None without --stop
        taken = count_steps(trainer.optimizer.optimizer)
        trainer.train()
    seconds, cpu = (
        [b - a for a, b in zip(ends, ends[1:], strict=False)] for ends in zip(*Clock.ends, strict=True)
    )
    due = (args.steps + 1) * args.epochs * args.minibatches
    assert len(seconds) == args.steps and taken[0] == due, (
        f"{len(Clock.ends)} PPO steps, {taken[0]} optimizer steps, not {due}"
    )
    args.json.write_text(json.dumps(report(args, seconds, cpu, lengths)) + "\n")


def build(trainer_class, args: argparse.Namespace, scratch: str, clock):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "model", padding_side="left")
    texts = [json.loads(line)["prompt"] for line in (args.folder / "prompts.jsonl").read_text().splitlines()]
    ids = [tokenizer(text)["input_ids"][-args.max_prompt_tokens :] for text in texts]
    accumulation = args.prompts // args.micro_rows
    config = PPOConfig(
        output_dir=scratch,
        use_cpu=not torch.cuda.is_available(),
        total_episodes=args.prompts * (args.steps + 1),
        per_device_train_batch_size=args.micro_rows,
        gradient_accumulation_steps=accumulation,
        num_ppo_epochs=args.epochs,
        num_mini_batches=args.minibatches,
        local_rollout_forward_batch_size=args.rollout_rows,
        response_length=args.new_tokens,
        stop_token="eos" if args.stop else None,
        temperature=1.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,  # the weights already have args.dtype; mixed precision would only add cost
        num_sample_generations=0,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )

    def load(auto_class, name: str, **extra):
        return auto_class.from_pretrained(args.folder / name, dtype=dtype, **extra)

    trainer = trainer_class(
        args=config,
        processing_class=tokenizer,
        model=load(AutoModelForCausalLM, "model"),
        ref_model=load(AutoModelForCausalLM, "model"),
        reward_model=load(AutoModelForSequenceClassification, "reward", num_labels=1),
        value_model=load(AutoModelForSequenceClassification, "reward", num_labels=1),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        callbacks=[clock],
    )
    trainer.accelerator.gradient_state.plugin_kwargs |= {
        "num_steps": accumulation // args.minibatches,
        "sync_with_dataloader": False,
    }
    return trainer


def count_steps(optimizer) -> list[int]:
    """Returns a list whose only element counts the steps of the torch optimizer."""
    count = [0]

    def after(*_args):
        count[0] += 1

    optimizer.register_step_post_hook(after)
    return count


def watch_lengths(ppo_trainer, stop_id: int | None) -> list[float]:
    """Returns a list to which each rollout appends the mean length of its responses."""
    means: list[float] = []
    inner = ppo_trainer.batch_generation

    def watched(model, queries, *args, **kwargs):
        answers, logits = inner(model, queries, *args, **kwargs)
        drawn = answers[:, queries.shape[1] :]
        stops = (drawn == stop_id) if stop_id is not None else drawn != drawn
        before = stops.cumsum(1) - stops.long()
        means.append(float((before == 0).sum(1).float().mean()))
        return answers, logits

    ppo_trainer.batch_generation = watched
    return means


def report(args: argparse.Namespace, seconds: list[float], cpu: list[float], lengths: list[float]) -> dict:
    import torch
    import transformers
    import trl

    found = {
        "step_seconds": seconds,
        "cpu_seconds": cpu,
        "samples_per_step": args.prompts,
        "response_tokens_mean": lengths[1:],
        "host_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "versions": {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if torch.cuda.is_available():
        found["alloc_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
