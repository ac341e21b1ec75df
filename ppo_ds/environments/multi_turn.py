"""Multi-turn responses: the policy and an environment take turns until the episode ends.

A response holds all turns of the policy and the feedback between them. Feedback is attended to, but it is no
action: response_mask is False, the log-prob is 0. ``sampling.max_new_tokens`` limits the whole response,
feedback included (as in TRL and verl). All rows of a rank take their turns together, and all ranks call the
backend equally often; a rank whose rows are all done decodes one token of a filler row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppo_ds.background.pending import wait_on_all_ranks
from ppo_ds.background.values import NoResult, quoted
from ppo_ds.data.prompts import collate_prompts
from ppo_ds.distributed.world import World
from ppo_ds.environments.base import Environment, InvalidResult, Step
from ppo_ds.environments.calls import CallPool, begin, describe_error, take_step
from ppo_ds.environments.feedback import encode_chat, encode_text
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.rollout.base import Generator, SamplingParams, max_new_tokens
from ppo_ds.types import DONE, ERROR, LENGTH, TIMEOUT, TURNS, Prompts, Rollout, Row

log = logging.getLogger(__name__)


@dataclass
class Episode:
    """One response while it is generated."""

    row: Row
    prompt: list[int]
    limit: int  # maximum number of tokens of the response
    environment: Environment = field(init=False)  # set by the reset
    end: str | None = None  # one of ENDS; None while the episode goes on
    # one entry per token of the response
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    is_feedback: list[bool] = field(default_factory=list)

    def append(self, ids: list[int], logprobs: list[float], is_feedback: bool) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.rewards += [0.0] * len(ids)
        self.is_feedback += [is_feedback] * len(ids)

    def next_prompt(self) -> tuple[list[int], int, Row]:
        """Returns the tokens so far, the number of tokens that may follow, and the row."""
        return self.prompt + self.ids, self.limit - len(self.ids), self.row


@dataclass(kw_only=True)
class MultiTurnGenerator:
    """Wraps a decode backend; implements the interface ``Generator``.

    Raises Abandoned on all ranks if ``check`` does.
    """

    backend: Generator
    make_environment: Callable[[], Environment]
    max_turns: int
    max_prompt_tokens: int  # limit of a prompt that an environment gives
    pool: CallPool
    tokenizer: Tokenizer
    world: World
    check: Callable[[], None]  # a collective that raises Abandoned on all ranks after a stop request
    warned: bool = field(init=False, default=False)

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        limits = max_new_tokens(prompts, sampling).tolist()
        given = zip(prompts.ids, prompts.mask, limits, prompts.metadata, strict=True)
        episodes = [Episode(row, ids[mask].tolist(), limit) for ids, mask, limit, row in given]
        resets = [(one, partial(begin, self.make_environment, one.row)) for one in episodes]
        self.run_calls(resets, self.begun)
        for turn in range(1, self.max_turns + 1):
            active = [episode for episode in episodes if episode.end is None]
            if self.world.max_int(len(active)) == 0:
                break
            filler = (episodes[0].prompt, 1, episodes[0].row)
            rows = [episode.next_prompt() for episode in active] or [filler]
            answers = self.backend(collate_prompts(rows, self.tokenizer.pad_id), sampling)
            self.check()
            turns = self.append_turns(active, answers)
            calls = [(episode, partial(take_step, episode.environment, text)) for episode, text in turns]
            self.run_calls(calls, partial(self.stepped, is_last=turn == self.max_turns))
        return self.rollout(episodes)

    def run_calls(
        self, calls: Sequence[tuple[Episode, Callable[[], Any]]], use: Callable[[Episode, Any], None]
    ) -> None:
        """Runs the call of each episode and uses their results in the order of the rows. A collective."""
        pending = self.pool.start([call for _, call in calls])
        outcomes = wait_on_all_ranks(pending, self.world, self.check)
        for (episode, _), outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.failed(episode, outcome)
                continue
            try:
                use(episode, outcome)
            except (InvalidResult, UserError) as error:  # a chat template may refuse a message
                self.failed(episode, error)

    def begun(self, episode: Episode, result: tuple[Environment, tuple[Message, ...] | None]) -> None:
        """Stores the environment, and the prompt that it gives."""
        episode.environment, messages = result
        if messages is None:
            return
        is_chat, tokenizer = self.tokenizer.has_chat_template, self.tokenizer
        text = "".join(message["content"] for message in messages)
        if is_chat:
            text = tokenizer.render_chat(list(messages))
        (ids,) = tokenizer.encode_many([text], special_tokens=not is_chat)
        if not ids:
            raise InvalidResult("returned a prompt without tokens")
        episode.prompt = ids[-self.max_prompt_tokens :]
        episode.row = episode.row | {"prompt_text": text} | ({"messages": list(messages)} if is_chat else {})

    def append_turns(self, active: Sequence[Episode], answers: Rollout) -> list[tuple[Episode, str]]:
        """Appends a turn of the policy to each episode; returns the complete turns as text.

        A turn that reached the limit of tokens is incomplete, and ends its episode.
        """
        turns = []
        for i, episode in enumerate(active):
            mask = answers.response_mask[i]
            ids = answers.response_ids[i][mask].tolist()
            episode.append(ids, answers.logprobs[i][mask].tolist(), is_feedback=False)
            if answers.finished[i]:
                turns.append((episode, self.tokenizer.decode(ids)))
            else:
                episode.end = LENGTH
        return turns

    def stepped(self, episode: Episode, step: Step, is_last: bool) -> None:
        """Stores the reward of a turn and appends the feedback, unless the episode ends."""
        if step.done or is_last:
            episode.rewards[-1] = step.reward
            episode.end = DONE if step.done else TURNS
            return
        if "messages" in episode.row:
            ids = encode_chat(self.tokenizer, step.feedback, episode.ids[-1])
        else:
            ids = encode_text(self.tokenizer, step.feedback)
        if not ids:
            raise InvalidResult("returned feedback without tokens")
        episode.rewards[-1] = step.reward  # not before: a turn with an error has no reward
        if len(episode.ids) + len(ids) >= episode.limit:
            episode.end = LENGTH
            return
        episode.append(ids, [0.0] * len(ids), is_feedback=True)

    def failed(self, episode: Episode, error: Exception) -> None:
        """Ends an episode because of an error. Only the first error on this rank is logged."""
        episode.end = TIMEOUT if isinstance(error, NoResult) else ERROR
        if not self.warned:
            log.warning(
                "the environment %s, for the prompt %s; this response ends there, and so does each later one "
                "with an error or a time-out (rollout/ended_error_frac and rollout/ended_timeout_frac)",
                describe_error(error),
                quoted(episode.row["prompt_text"]),
            )
        self.warned = True

    def rollout(self, episodes: Sequence[Episode]) -> Rollout:
        prompts = collate_prompts([(e.prompt, e.limit, e.row) for e in episodes], self.tokenizer.pad_id)
        lengths = torch.tensor([len(episode.ids) for episode in episodes])
        attended = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]

        def column(values: list[list[Any]], filler: Any) -> Tensor:
            out = torch.full(attended.shape, filler)
            out[attended] = torch.tensor([value for row in values for value in row], dtype=out.dtype)
            return out

        feedback_mask = column([episode.is_feedback for episode in episodes], False)
        ids = column([episode.ids for episode in episodes], self.tokenizer.pad_id)
        return Rollout(
            ids=torch.cat([prompts.ids, ids], 1),
            attention_mask=torch.cat([prompts.mask, attended], 1),
            response_mask=attended & ~feedback_mask,
            feedback_mask=feedback_mask,
            finished=torch.tensor([episode.end == DONE for episode in episodes]),
            limits=prompts.limits,
            logprobs=column([episode.logprobs for episode in episodes], 0.0),
            metadata=prompts.metadata,
            turn_rewards=column([episode.rewards for episode in episodes], 0.0),
            episode_ends=tuple(episode.end or TURNS for episode in episodes),
        )
