"""Estimates the memory of supervised fine-tuning and of reward-model training on one rank.

For supervised fine-tuning, the estimate assumes that all tokens of a row are in the loss (sft.learn=all).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppo_ds.compute.sizes import Shape
from ppo_ds.config.schema import RewardModelStageConfig, SFTStageConfig
from ppo_ds.planning.model_memory import decode_bytes_bound, logit_bytes
from ppo_ds.planning.run_memory import Estimate, Hardware, RunMemory

FinetuneConfig = SFTStageConfig | RewardModelStageConfig


@dataclass(frozen=True)
class Batch:
    """The rows or pairs of one optimizer step."""

    what: str  # rows or pairs
    size: int  # number of rows or pairs, over all ranks
    texts: int  # texts in each row or pair, which a forward keeps together
    max_tokens: int  # of one text


def batch_of(config: FinetuneConfig) -> Batch:
    """Returns the kind, number and length of the rows or pairs of an optimizer step."""
    if isinstance(config, SFTStageConfig):
        return Batch("rows", config.sft.batch_size, 1, config.sft.max_tokens)
    return Batch("pairs", config.reward_model.batch_size, 2, config.reward_model.max_tokens)


class FinetuneMemory(RunMemory):
    """Computes the estimate of a run that trains one model."""

    def __init__(
        self,
        config: FinetuneConfig,
        hardware: Hardware,
        *,
        name: str,
        shape: Shape,
        longest: int,
        evaluated: int,
        answers: tuple[int, int] = (0, 0),
    ):
        """Initializes the estimate. The longest text has ``longest`` tokens.

        ``evaluated`` is the number of held-out rows or pairs. ``answers`` are the number of
        held-out prompts to answer and the maximum number of tokens of a prompt and its answer together.
        """
        batch = batch_of(config)
        rows = batch.texts * -(-batch.size // hardware.ranks)
        super().__init__(config, hardware, {name: shape}, {}, length=longest, rows=rows, unit=batch.texts)
        self.answers, self.answer_tokens = -(-answers[0] // hardware.ranks), answers[1]
        self.name, self.evaluated_rows = name, batch.texts * -(-evaluated // hardware.ranks)

    def estimate(self) -> Estimate:
        engine, memory = self.engines[self.name], self.config.memory
        resident = {self.name: engine.resident} | self.averages()
        rest = sum(resident.values())
        phases = {"loading": self.loading()}
        if self.evaluated_rows:
            tokens = self.forward_tokens(int(memory.score_tokens), self.evaluated_rows)
            phases["eval"] = rest + self.trained_forward(self.name, tokens, prefetch=True)
        if self.answers:
            phases["generate"] = rest + self.generation()
        update = max(self.backward(self.name), engine.gradients + engine.step)
        phases[f"update_{self.name}"] = rest + update
        host = engine.host if self.hardware.on_gpu else 0
        return Estimate(resident, phases, host, self.engines, "", row_tokens=self.length, rows=self.answers)

    def generation(self) -> int:
        """Computes an upper bound of the bytes that answering prompts adds, if all weights are gathered."""
        section, shape, each = self._role(self.name)
        most = max(1, int(dict(self.config.memory)["rollout_tokens"]) // self.answer_tokens)
        rows = min(self.answers, most)
        gathered = each * shape.parameters if section.zero.stage == 3 else 0
        logit = logit_bytes(each, self.hardware.on_gpu, top_k=1, top_p=1.0)  # greedy
        return gathered + decode_bytes_bound(shape, rows * self.answer_tokens, rows, each, logit)

    def head_positions(self, tokens: int) -> int:
        """Counts all tokens for a language model, and one position per text for a reward model."""
        return tokens if self.shapes[self.name].head else tokens // self.length


def estimate_finetuning(config: FinetuneConfig, hardware: Hardware, **sizes: Any) -> Estimate:
    """Estimates the memory of a run on one rank; FinetuneMemory documents the arguments."""
    return FinetuneMemory(config, hardware, **sizes).estimate()
