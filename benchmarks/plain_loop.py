"""Runs PPO steps of a plain PyTorch loop on a prepared folder, with the options of trl_step.py.

See docs/dev/performance.md. The loop is one that a user would write with torch and transformers alone, in one
process: transformers' ``generate``, whole forwards with logits at every position, ``log_softmax`` and
``gather``, generalized advantage estimation, clipped losses, and torch's AdamW on weights of the run's dtype,
with separate models for policy, reference, values and rewards. It imports nothing from ppo_ds.

    python benchmarks/ppo_step.py W6 --against plain --ranks 2 --threads 1
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

CLIP, VALUE_CLIP, VALUE_COEF, KL_COEF, GAMMA, LAM, MAX_NORM = 0.2, 0.2, 0.5, 0.05, 1.0, 0.95, 1.0


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="model/, reward/ and prompts.jsonl")
    parser.add_argument("--stop", action="store_true", help="the tokenizer's end token ends a response")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    counts = {
        "steps": "measured steps, after one that is not measured",
        "prompts": "prompts of a step",
        "new-tokens": "longest response",
        "max-prompt-tokens": "longest prompt",
        "epochs": "epochs over a rollout",
        "minibatches": "optimizer steps of an epoch",
        "micro-rows": "rows of a forward and backward of the update",
        "rollout-rows": "rows of generate and of the forwards before the update",
        "threads": "threads of torch",
    }
    for name, text in counts.items():
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    return parser.parse_args(argv)


class Loop:
    """The models, the prompts and the optimizers of the loop."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
        model, reward = args.folder / "model", args.folder / "reward"
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.reference = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).requires_grad_(False)
        classifier = AutoModelForSequenceClassification
        self.values = classifier.from_pretrained(reward, dtype=dtype, num_labels=1)
        self.reward = classifier.from_pretrained(reward, dtype=dtype, num_labels=1).requires_grad_(False)
        for each in (self.policy, self.reference, self.values, self.reward):
            each.eval()  # the models have no dropout
        self.optimizers = [
            torch.optim.AdamW(each.parameters(), lr=args.lr) for each in (self.policy, self.values)
        ]
        self.optimizer_steps = 0
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.pad, self.stop = tokenizer.pad_token_id, tokenizer.eos_token_id if args.stop else None
        lines = (args.folder / "prompts.jsonl").read_text().splitlines()
        ids = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines[: args.prompts]]
        rows = {"input_ids": [row[-args.max_prompt_tokens :] for row in ids]}
        padded = tokenizer.pad(rows, return_tensors="pt")
        self.prompts, self.prompt_mask = padded["input_ids"], padded["attention_mask"]

    def step(self) -> float:
        """Runs one PPO step and returns the mean length of its responses."""
        with torch.no_grad():
            rollout = self.rollout()
        for _ in range(self.args.epochs):
            order = torch.randperm(self.args.prompts)
            for rows in order.chunk(self.args.minibatches):
                self.update({name: each[rows] for name, each in rollout.items()})
        return float(rollout["response_mask"].sum(1).float().mean())

    def rollout(self) -> dict[str, Tensor]:
        """Generates a response to each prompt and computes its rewards, values and advantages."""
        parts = [
            self.score(*rows)
            for rows in zip(
                self.prompts.split(self.args.rollout_rows),
                self.prompt_mask.split(self.args.rollout_rows),
                strict=True,
            )
        ]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        mask = found["response_mask"]
        mean = found["advantages"][mask].mean()
        found["advantages"] = (found["advantages"] - mean) / (found["advantages"][mask].std() + 1e-8)
        return found

    def score(self, prompts: Tensor, prompt_mask: Tensor) -> dict[str, Tensor]:
        """Generates responses to some of the prompts and computes what the update needs."""
        ids = self.policy.generate(
            input_ids=prompts,
            attention_mask=prompt_mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=self.args.new_tokens,
            eos_token_id=self.stop,
            pad_token_id=self.pad,
        )
        responses = ids[:, prompts.shape[1] :]
        if self.stop is None:
            response_mask = torch.ones_like(responses, dtype=torch.bool)
        else:
            stops = (responses == self.stop).long()
            response_mask = (stops.cumsum(1) - stops) == 0
        mask = torch.cat([prompt_mask, response_mask.long()], dim=1)
        old, reference = (self.logprobs(lm, ids, mask) for lm in (self.policy, self.reference))
        values = self.state_values(ids, mask).masked_fill(~response_mask, 0.0)
        last = response_mask.sum(1) - 1
        scores = self.reward.score(self.trunk(self.reward, ids, mask))[:, prompts.shape[1] :, 0]
        rewards = (-KL_COEF * (old - reference)).masked_fill(~response_mask, 0.0)
        rewards[torch.arange(len(ids)), last] += scores[torch.arange(len(ids)), last].float()
        advantages = estimate_advantages(rewards, values)
        return {
            "ids": ids,
            "mask": mask,
            "response_mask": response_mask,
            "old_logprobs": old,
            "old_values": values,
            "advantages": advantages,
            "returns": advantages + values,
        }

    def logprobs(self, lm: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """Computes the log-probs of the responses in fp32: [B,R]."""
        start = ids.shape[1] - self.response_width(ids)
        logits = lm(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).logits[
            :, start - 1 : -1
        ]
        logprobs = F.log_softmax(logits.float(), dim=-1)
        return logprobs.gather(-1, ids[:, start:].unsqueeze(-1)).squeeze(-1)

    def state_values(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Computes the values of the states before each response token in fp32: [B,R]."""
        start = ids.shape[1] - self.response_width(ids)
        states = self.trunk(self.values, ids, mask)
        return self.values.score(states)[:, start - 1 : -1, 0].float()

    def trunk(self, model: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """Computes the last hidden states [B,T,H] of a classifier's trunk."""
        return model.model(
            input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False
        ).last_hidden_state

    def response_width(self, ids: Tensor) -> int:
        """Returns the number of response columns, which is smaller if all responses stopped early."""
        return ids.shape[1] - self.prompts.shape[1]

    def update(self, rows: dict[str, Tensor]) -> None:
        """Takes one optimizer step of policy and values."""
        total = rows["response_mask"].sum()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for start in range(0, len(rows["ids"]), self.args.micro_rows):
            part = {name: each[start : start + self.args.micro_rows] for name, each in rows.items()}
            self.loss(part, total).backward()
        for model, optimizer in zip((self.policy, self.values), self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        self.optimizer_steps += 1

    def loss(self, rows: dict[str, Tensor], total: Tensor) -> Tensor:
        """Computes the clipped policy loss and value loss of a micro-batch, as its part of the token mean."""
        mask, advantages = rows["response_mask"], rows["advantages"]
        ratio = (self.logprobs(self.policy, rows["ids"], rows["mask"]) - rows["old_logprobs"]).exp()
        policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        values, old = self.state_values(rows["ids"], rows["mask"]), rows["old_values"]
        clipped = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
        value = torch.max((values - rows["returns"]) ** 2, (clipped - rows["returns"]) ** 2)
        return ((policy + VALUE_COEF * value) * mask).sum() / total


def positions(mask: Tensor) -> Tensor:
    """Computes the position ids of left-padded rows."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def estimate_advantages(rewards: Tensor, values: Tensor) -> Tensor:
    """Computes generalized advantage estimates [B,R]; the value after the last token is 0."""
    advantages, running = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    after = torch.zeros_like(running)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * after - values[:, t]
        running = delta + GAMMA * LAM * running
        advantages[:, t], after = running, values[:, t]
    return advantages


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    loop = Loop(args)
    seconds, cpu, lengths = [], [], []
    for _ in range(args.steps + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        lengths.append(loop.step())
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    due = (args.steps + 1) * args.epochs * args.minibatches
    assert loop.optimizer_steps == due, f"{loop.optimizer_steps} optimizer steps, not {due}"
    found = {
        "step_seconds": seconds[1:],
        "cpu_seconds": cpu[1:],
        "samples_per_step": args.prompts,
        "response_tokens_mean": lengths[1:],
        "host_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    args.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
