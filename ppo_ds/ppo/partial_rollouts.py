"""Partial rollouts: responses that have not ended in a step are continued in later steps, with newer weights.

A step trains on a fixed number of prompts per rank, the rank's share. Each rank generates responses to
``rollout.oversample`` times as many prompts, until all responses to a full share have ended (Kimi k1.5, 2025;
AReaL, Fu et al. 2025). Every started prompt is trained on in some step, so the policy's distribution of
response lengths is kept. Only responses in progress when the run ends are lost, mostly long ones.

A token's log-prob is that of the policy version that sampled it. The old log-probs of the ratio are those of
the current policy, and ``algo.rollout_is`` weights each token by the quotient of old and sampling probability
(decoupled objective, Hilton et al. 2021).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ppo_ds.background.pending import Pending
from ppo_ds.data.prompts import PromptStream
from ppo_ds.distributed.world import World
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ppo.collector import RolloutCollector
from ppo_ds.rollout.base import Continuation, PartialGenerator, truncate_at_stop
from ppo_ds.rollout.keys import PartialRollouts
from ppo_ds.types import Metrics, Rollout, Scores

# fields of Response with one entry per token
COLUMNS = ("tokens", "logprobs", "versions")


@dataclass(eq=False)
class Response:
    """A response that is not yet trained on, complete or still being generated.

    The lists have one entry per sampled token.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # by the version that sampled the token
    versions: list[int] = field(default_factory=list)  # optimizer steps of the actor before it was sampled
    ended: bool = False  # by a stop or its limit


@dataclass(eq=False)
class Group:
    """All responses to one prompt, which are trained on in the same step."""

    prompt: int  # index in the data set
    responses: list[Response]


@dataclass(kw_only=True)
class PartialRolloutCollector(RolloutCollector):
    """Collects the responses to a step's share of the prompts; keeps all other responses for later steps.

    Every rank collects its share of the prompts without waiting for other ranks' responses. All ranks have
    equally many prompts in progress, so that a checkpoint can be divided among another number of ranks.
    """

    prompts: PromptStream
    generator: PartialGenerator
    section: PartialRollouts
    tokenizer: Tokenizer
    world: World
    groups: list[Group] = field(init=False, default_factory=list)  # not trained on yet, oldest first

    def __call__(self) -> tuple[Rollout, Pending[Scores], Metrics]:
        """Collects this rank's share of the prompts with ended responses. All ranks must call this."""
        share, size = self.section.prompts_per_step // self.world.size, self.section.samples_per_prompt
        started, version = ceil(self.section.oversample * share), self.actor.steps
        while len(self.groups) < started:
            new = self.prompts.next_indices()[::size]
            self.groups += [Group(prompt, [Response() for _ in range(size)]) for prompt in new]
        self.generate(self.groups[:started], share, version)
        done = [group for group in self.groups if all(one.ended for one in group.responses)][:share]
        self.groups = [group for group in self.groups if group not in done]
        rollout = self.rollout(done, version)
        carried = sum(bool(response.tokens) for group in self.groups for response in group.responses)
        total = self.world.sum(torch.tensor([carried], dtype=torch.float64))
        return rollout, self.score(rollout), {"rollout/carried": float(total)}

    def generate(self, groups: list[Group], share: int, version: int) -> None:
        """Continues the responses of ``groups`` until all responses of ``share`` groups have ended.

        All ranks must call this. A response is not interrupted if ``version`` is the last of its
        rollout.max_versions policy versions.
        """
        rows = [(group, one) for group in groups for one in group.responses if not one.ended]
        versions = [len({*response.versions, version}) for _, response in rows]
        urgent = {row for row, count in enumerate(versions) if count >= self.section.max_versions}

        def enough(ended: Set[int]) -> bool:
            unfinished = {group for row, (group, _) in enumerate(rows) if row not in ended}
            return urgent <= ended and len(groups) - len(unfinished) >= share

        prompts = self.prompts.source.batch([group.prompt for group, _ in rows])
        continuation = Continuation([response.tokens for _, response in rows], enough)
        with self.actor.generation_mode(), self.timer("generate"):
            found = self.generator(prompts, self.sampling, continuation)
        self.check()
        lengths = found.response_lengths
        ended = found.finished | (lengths == found.limits)
        for row, (_, response) in enumerate(rows):
            new = slice(len(response.tokens), int(lengths[row]))
            response.tokens += found.response_ids[row, new].tolist()
            response.logprobs += found.logprobs[row, new].tolist()
            response.versions += [version] * (new.stop - new.start)
            response.ended = bool(ended[row])

    def rollout(self, groups: list[Group], version: int) -> Rollout:
        """Returns the responses of ``groups`` as the rows of a rollout."""
        rows = [(group.prompt, response) for group in groups for response in group.responses]
        ids, logprobs, versions = (
            pad_sequence([torch.tensor(getattr(response, name)) for _, response in rows], batch_first=True)
            for name in COLUMNS
        )
        rollout = truncate_at_stop(
            self.prompts.source.batch([prompt for prompt, _ in rows]),
            ids,
            logprobs,
            sampling=self.sampling,
            tokenizer=self.tokenizer,
            lengths=torch.tensor([len(response.tokens) for _, response in rows]),
        )
        return replace(rollout, staleness=(version - versions) * rollout.response_mask).trimmed()

    def state_dict(self) -> dict[str, Any]:
        """Returns the responses of all ranks that are not yet trained on. All ranks must call this."""
        rows = [response for group in self.groups for response in group.responses]
        own: dict[str, list[Any]] = {
            "prompts": [group.prompt for group in self.groups],
            "ended": [response.ended for response in rows],
            "lengths": [len(response.tokens) for response in rows],
            **{name: [x for response in rows for x in getattr(response, name)] for name in COLUMNS},
        }
        ranks = self.world.gather_objects(own)
        state = {name: torch.tensor([x for rank in ranks for x in rank[name]]) for name in own}
        return {**state, "checksums": self.checksums(state["prompts"].tolist())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores this rank's responses; raises UserError if a changed setting or data set prevents this."""
        indices, lengths = state["prompts"].tolist(), state["lengths"].tolist()
        size, share = self.section.samples_per_prompt, len(indices) // self.world.size
        limit, longest = self.sampling.max_new_tokens, max(lengths, default=0)
        changed = ""
        if len(lengths) != size * len(indices):
            changed = f"rollout.samples_per_prompt={size}: it was {len(lengths) // len(indices)}"
        elif longest > limit:
            changed = f"sampling.max_new_tokens={limit}: one of them has {longest} tokens"
        elif max(indices, default=0) >= len(self.prompts.source) or not torch.equal(
            self.checksums(indices), state["checksums"]
        ):
            changed = f"data.path={self.prompts.source.path}: its rows have changed"
        if changed:
            raise UserError(
                f"{changed}, so the responses in progress in the checkpoint cannot be continued; undo the "
                "change, or begin anew with run.resume=restart"
            )
        ended = (state["ended"].bool() | (state["lengths"] >= limit)).tolist()
        columns = [[part.tolist() for part in state[name].split(lengths)] for name in COLUMNS]
        rows = [Response(*row) for row in zip(*columns, ended, strict=True)]
        groups = [Group(prompt, rows[i * size : (i + 1) * size]) for i, prompt in enumerate(indices)]
        self.groups = groups[self.world.rank * share :][:share]

    def checksums(self, indices: list[int]) -> Tensor:
        """Returns a checksum of the tokens of each prompt at ``indices``, [len(indices)] long."""
        batches = (self.prompts.source.batch([index]) for index in indices)
        return torch.tensor([crc32(batch.ids[batch.mask].numpy().tobytes()) for batch in batches])
