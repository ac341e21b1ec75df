"""Multi-turn responses: the policy and an environment take turns until the episode ends.

A response holds all turns of the policy and the feedback between them. The policy attends to feedback, but
feedback is no action, so its response_mask is False and its log-prob is 0. ``sampling.max_new_tokens`` limits
the whole response, feedback included (as in TRL and verl).

The backend generates one turn of all ready rows at a time. All ranks call it equally often, so a rank without
ready rows decodes one token of a filler row. All rows take their turns together, or, if ``independent``, each
row when its environment call has ended. Independent rows have separate seeds, so that the timing of calls
changes only the batch in which a row is generated, and thus the rounding of its log-probs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppo_ds.background.pending import POLL_SECONDS
from ppo_ds.background.pool import torch_rng_snapshot
from ppo_ds.background.values import NoResult, quoted
from ppo_ds.data.prompts import collate_prompts
from ppo_ds.distributed import heartbeat
from ppo_ds.distributed.world import World
from ppo_ds.environments.base import Environment, InvalidResult, Step
from ppo_ds.environments.calls import CallPool, begin, describe_error, take_step
from ppo_ds.environments.feedback import encode_chat, encode_prompt
from ppo_ds.environments.tool_calls import CallReader
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.rollout.base import Generator, SamplingParams, max_new_tokens
from ppo_ds.types import DONE, ERROR, LENGTH, TIMEOUT, TURNS, Prompts, Rollout, Row

log = logging.getLogger(__name__)


@dataclass
class Episode:
    """A response during generation."""

    row: Row
    prompt: list[int]
    limit: int  # maximum number of tokens of the response
    seeds: Sequence[int]  # one for each turn; () unless rows are independent
    turns: int = 0  # turns of the policy so far
    call: Future[Any] | None = None  # the running call of the environment
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


@dataclass(kw_only=True)
class MultiTurnGenerator:
    """Wraps a decode backend; implements the interface ``Generator``.

    All ranks must call this. ``check`` may raise Abandoned, then on all ranks.
    """

    backend: Generator
    make_environment: Callable[[], Environment]
    independent: bool  # whether a row continues while calls of other rows are running
    read_calls: CallReader | None  # None for an environment without tools
    max_turns: int
    max_prompt_tokens: int  # maximum tokens of an environment's prompt
    pool: CallPool
    tokenizer: Tokenizer
    world: World
    check: Callable[[], None]  # a collective that raises Abandoned on all ranks after a stop request
    warned: bool = field(init=False, default=False)

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        limits = max_new_tokens(prompts, sampling).tolist()
        seeds: Any = ((),) * len(prompts)
        if self.independent:  # the order in which rows are generated must not change their random numbers
            seeds = torch.randint(2**62, (len(prompts), self.max_turns)).tolist()
        given = zip(prompts.ids, prompts.mask, limits, prompts.metadata, seeds, strict=True)
        episodes = [Episode(row, ids[mask].tolist(), limit, own) for ids, mask, limit, row, own in given]
        restore_rng = torch_rng_snapshot()  # calls must not change later sampling
        try:
            for episode in episodes:
                episode.call = self.pool.start(partial(begin, self.make_environment, episode.row))
            while True:
                running = self.wait_for_calls(episodes)
                restore_rng()
                self.use_results(episodes)
                ready = [one for one in episodes if one.call is None and one.end is None]
                if self.world.max_int(len(ready)) > 0:
                    answers = self.generate(ready, episodes[0], sampling)
                    restore_rng = restore_rng if self.independent else torch_rng_snapshot()
                    self.append_turns(ready, answers)
                elif running == 0:
                    return self.rollout(episodes)
        except BaseException:
            for episode in reversed(episodes):  # before a running call frees its slot for a waiting call
                if episode.call is not None:
                    episode.call.cancel()
            raise

    def wait_for_calls(self, episodes: Sequence[Episode]) -> int:
        """Waits for the calls of all ranks; returns the number still running. All ranks must call this.

        Independent rows wait up to half a second for all calls, since a larger batch decodes faster, and then
        until any call has ended. A call that ends on any rank counts as progress on all ranks.
        """
        calls = [episode.call for episode in episodes if episode.call is not None]
        completed, total = 0, int(self.world.sum(torch.tensor(len(calls))))
        with heartbeat.counting(total, "calls") as done:
            while True:
                ended = len(wait(calls, POLL_SECONDS).done)
                self.check()
                now = int(self.world.sum(torch.tensor(ended)))
                if now > completed:
                    heartbeat.beat()
                    done(now)
                completed = now
                if now == total or (self.independent and now > 0):
                    return total - now

    def use_results(self, episodes: Sequence[Episode]) -> None:
        """Passes the results of ended calls to ``begun``, ``stepped`` or ``failed``, in row order."""
        for episode in episodes:
            if episode.call is None or not episode.call.done():
                continue
            outcome, episode.call = episode.call.result(), None
            if isinstance(outcome, Exception):
                self.failed(episode, outcome)
                continue
            try:
                (self.stepped if episode.turns else self.begun)(episode, outcome)
            except (InvalidResult, UserError) as error:  # a chat template may refuse a message
                self.failed(episode, error)

    def begun(self, episode: Episode, result: tuple[Environment, tuple[Message, ...] | None]) -> None:
        """Stores the new environment and its prompt, unless the prompt of the data is kept."""
        episode.environment, messages = result
        has_tools = self.read_calls is not None
        prompt = encode_prompt(self.tokenizer, messages, episode.row, self.max_prompt_tokens, has_tools)
        if prompt is not None:
            episode.prompt, episode.row = prompt

    def generate(self, ready: Sequence[Episode], any_row: Episode, sampling: SamplingParams) -> Rollout:
        """Generates a turn of each ready episode, else one token of ``any_row``. All ranks must call this."""
        rows = [(one.prompt + one.ids, one.limit - len(one.ids), one.row) for one in ready]
        rows = rows or [(any_row.prompt, 1, any_row.row)]
        prompts = collate_prompts(rows, self.tokenizer.pad_id)
        if self.independent:
            seeds = [episode.seeds[episode.turns] for episode in ready] or [0]
            prompts = replace(prompts, seeds=torch.tensor(seeds))
            torch.manual_seed(seeds[0])  # for a user's backend that ignores the seeds of the rows
        answers = self.backend(prompts, sampling)
        self.check()
        return answers

    def append_turns(self, ready: Sequence[Episode], answers: Rollout) -> None:
        """Appends a policy turn to each episode. If the turn is complete, starts the environment's step.

        A turn that reached the token limit is incomplete and ends its episode.
        """
        for i, episode in enumerate(ready):
            mask = answers.response_mask[i]
            ids = answers.response_ids[i][mask].tolist()
            episode.append(ids, answers.logprobs[i][mask].tolist(), is_feedback=False)
            episode.turns += 1
            if not answers.finished[i]:
                episode.end = LENGTH
                continue
            turn: tuple[Any, ...] = (self.tokenizer.decode(ids),)
            if self.read_calls is not None:
                kept = ids[:-1] if ids[-1] in self.tokenizer.stop_ids else ids
                turn += (self.read_calls(self.tokenizer.decode(kept, skip_special_tokens=False)),)
            episode.call = self.pool.start(partial(take_step, episode.environment, *turn))

    def stepped(self, episode: Episode, step: Step) -> None:
        """Stores the reward of a turn; appends the feedback unless the episode ends."""
        if step.done or episode.turns == self.max_turns:
            episode.rewards[-1] = step.reward
            episode.end = DONE if step.done else TURNS
            return
        if "messages" in episode.row:
            ids = encode_chat(self.tokenizer, step.feedback, episode.ids[-1])
        else:
            text = "".join(message["content"] for message in step.feedback)
            (ids,) = self.tokenizer.encode_many([text], special_tokens=False)
        if not ids:
            raise InvalidResult("returned feedback without tokens")
        episode.rewards[-1] = step.reward  # not before: a turn with an error has no reward
        if len(episode.ids) + len(ids) >= episode.limit:
            episode.end = LENGTH
            return
        episode.append(ids, [0.0] * len(ids), is_feedback=True)

    def failed(self, episode: Episode, error: Exception) -> None:
        """Ends an episode because of an error. Only the rank's first error is logged."""
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
