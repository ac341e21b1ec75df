"""Chat with one or two policies: conversations, commands, streamed answers and their scores.

Each model has a conversation of its own, with its own answers to the same messages. The models answer one
after the other, with the same random numbers for both, so that a chat with the same input can be repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ppo_ds.assemble.data import stop_ids
from ppo_ds.assemble.ppo import build_sampling
from ppo_ds.assemble.preflight import OWN, function_rewards
from ppo_ds.assemble.reward_models import RewardModels, build_reward
from ppo_ds.config.schema import Config, reward_models
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.config.targets import bind
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import freeze
from ppo_ds.errors import UserError, printable
from ppo_ds.models.download import download_files, download_weights
from ppo_ds.models.loading import config_of
from ppo_ds.models.policy import Policy
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.planning.budgets import CPU_LIMITS
from ppo_ds.rewards.user_function import load_function
from ppo_ds.rewards.weighted import WeightedReward
from ppo_ds.rollout.base import SamplingParams, truncate_at_stop
from ppo_ds.rollout.streaming import StreamedResponse
from ppo_ds.run.token_budgets import TokenBudget
from ppo_ds.storage.drafts import write_file
from ppo_ds.tools.model_argument import NamedModel
from ppo_ds.tools.policies import hub_models, load_decoder, model_section, tokenizer_of
from ppo_ds.tracking.chat import ChatView
from ppo_ds.types import Prompts, Reward

HELP = """\
/system TEXT   sets the system message and begins a new conversation; without TEXT, shows it
/reset         begins a new conversation
/retry         asks for another answer to the last message
/save FILE     writes the conversations as JSON lines with "messages", which stage=sft can train on
/help          shows this list
/quit          ends the chat, as Ctrl-D does
Ctrl-C stops an answer. A line that ends with \\ continues on the next one. //TEXT sends /TEXT."""


@dataclass
class Partner:
    """A model with its conversation."""

    name: str
    policy: Policy
    tokenizer: Tokenizer
    sampling: SamplingParams
    reward: Reward | None
    messages: list[Message] = field(default_factory=list)

    def prompt(self) -> tuple[str, list[int]]:
        """Returns the text and the ids that the model continues.

        Without a chat template this is the last message as plain text. Raises UserError if the template
        refuses the conversation or the model has no positions left for an answer.
        """
        chat = self.tokenizer.has_chat_template
        text = self.tokenizer.render_chat(self.messages) if chat else self.messages[-1]["content"]
        # a chat template writes the special tokens itself
        (ids,) = self.tokenizer.encode_many([text], special_tokens=not chat)
        if not ids:
            raise UserError("the message has no tokens")
        if len(ids) >= (self.policy.max_tokens or len(ids) + 1):
            raise UserError(
                f"{self.name}: the conversation has {len(ids)} tokens, and the model has only "
                f"{self.policy.max_tokens} positions; /reset begins a new one"
            )
        return text, ids

    def sampling_after(self, prompt_tokens: int) -> SamplingParams:
        """Returns the sampling parameters, with as many new tokens as the model has positions for."""
        room = (self.policy.max_tokens or 2**31) - prompt_tokens
        return replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room))


@dataclass
class Answer:
    """A finished answer of a model."""

    text: str
    tokens: int
    finish: str  # stop, length, or stopped by the user
    seconds: float
    score: str = ""  # the score in words, or why there is none

    def summary(self) -> str:
        """Returns the line that is shown below the answer."""
        speed = f"{self.tokens / self.seconds:.1f} tokens/s" if self.seconds > 0 else ""
        parts = (self.score, f"{self.tokens} tokens", self.finish, speed)
        return " · ".join(part for part in parts if part)


@dataclass
class Chat:
    """A conversation with one or several models, driven by lines of input."""

    partners: Sequence[Partner]
    view: ChatView
    seed: int
    system: str | None = None
    turns: int = 0  # answers so far, /retry included

    def reply(self, line: str) -> bool:
        """Handles a line of input; returns False if it ends the chat."""
        text = line.strip()
        if not text:
            return True
        if text.startswith("/") and not text.startswith("//"):
            return self.command(*(text.split(None, 1) + [""])[:2])
        self.say(text.removeprefix("/") if text.startswith("//") else line)
        return True

    def command(self, name: str, rest: str) -> bool:
        """Runs a command; returns False for /quit."""
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            self.view.note(HELP)
        elif name == "/reset":
            self.reset()
            self.view.note("a new conversation")
        elif name == "/system":
            if rest:
                self.system = rest.strip()
                self.reset()
            self.view.note(f"system: {self.system}" if self.system else "no system message")
            for partner in self.partners if self.system else []:
                if not partner.tokenizer.has_chat_template:
                    self.view.note(f"{partner.name} has no chat template: it reads no system message")
        elif name == "/retry":
            self.retry()
        elif name == "/save":
            self.save(rest.strip())
        else:
            self.view.note(f"{name}: no such command; /help lists them, and /{name} sends it as a message")
        return True

    def reset(self) -> None:
        """Begins a new conversation with every model."""
        for partner in self.partners:
            partner.messages.clear()

    def retry(self) -> None:
        """Drops the last answers and asks for others."""
        last = [partner.messages[-2:] for partner in self.partners]
        asked = next((pair[0]["content"] for pair in last if len(pair) == 2), None)
        if asked is None:
            self.view.note("there is no message to answer again")
            return
        for partner in self.partners:
            del partner.messages[-2:]
        self.say(asked)

    def save(self, name: str) -> None:
        """Writes one JSON line per model."""
        if not name:
            self.view.note("/save FILE: give the name of a file")
            return
        path = Path(name).expanduser()
        rows = [
            {"model": partner.name, "messages": partner.messages}
            for partner in self.partners
            if partner.messages
        ]
        if not rows:
            self.view.note("nothing was said yet")
        elif path.exists():
            self.view.note(f"{path}: exists; choose another name")
        else:
            try:
                write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
                self.view.note(f"saved in {path}")
            except OSError as error:
                self.view.note(f"{path}: cannot be written: {error.strerror}; choose another name")

    def say(self, text: str) -> None:
        """Sends a message to every model and shows the answers. An interrupt stops the current answer."""
        self.turns += 1
        with self.view.answers([partner.name for partner in self.partners]) as columns:
            for partner, column in zip(self.partners, columns, strict=True):
                if not partner.messages and self.system and partner.tokenizer.has_chat_template:
                    partner.messages.append({"role": "system", "content": self.system})
                before = len(partner.messages)
                partner.messages.append({"role": "user", "content": text})
                try:
                    answer = self.answer(partner, column.write)
                except UserError as error:
                    del partner.messages[before:]
                    column.end(str(error))
                else:
                    partner.messages.append({"role": "assistant", "content": answer.text})
                    column.end(answer.summary())

    def answer(self, partner: Partner, show: Callable[[str], None]) -> Answer:
        """Generates and scores the answer to the last message; ``show`` receives pieces of its text."""
        text, ids = partner.prompt()
        torch.manual_seed(self.seed + self.turns)
        sampling, start, shown = partner.sampling_after(len(ids)), time.perf_counter(), ""
        stream, interrupted = StreamedResponse(partner.policy.lm, ids, sampling, partner.tokenizer), False
        try:
            for piece in stream:
                shown += piece
                show(piece)
            stream.join()
        except KeyboardInterrupt:
            interrupted = True
            stream.stop()
            stream.join()
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{partner.name}: out of memory; /reset, or lower sampling.max_new_tokens"
            ) from error
        seconds = time.perf_counter() - start
        response = partner.tokenizer.decode(stream.ids)
        if response.startswith(shown):
            show(response[len(shown) :])
        stops = set(sampling.stop_token_ids)
        finished = bool(stops & set(stream.ids[-1:])) or any(s in response for s in sampling.stop_strings)
        finish = "stop" if finished else "stopped by Ctrl-C" if interrupted else "length"
        answer = Answer(response, len(stream.ids), finish, seconds)
        if partner.reward is not None and stream.ids:
            answer.score = score(partner, partner.reward, text, ids, stream.ids, sampling)
        return answer


def score(
    partner: Partner,
    reward: Reward,
    prompt_text: str,
    prompt: list[int],
    response: list[int],
    sampling: SamplingParams,
) -> str:
    """Returns the score of an answer in words, or why the reward cannot score it."""
    row: dict[str, Any] = {"prompt_text": prompt_text, "data_source": "chat"}
    if partner.tokenizer.has_chat_template:
        row["messages"] = [dict(message) for message in partner.messages]
    ids = torch.tensor([prompt])
    prompts = Prompts(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([len(response)]), (row,))
    tokens = torch.tensor([response])
    rollout = truncate_at_stop(
        prompts, tokens, torch.zeros(tokens.shape), sampling=sampling, tokenizer=partner.tokenizer
    )
    try:
        found = reward.evaluate(rollout) if isinstance(reward, WeightedReward) else reward(rollout)
    except KeyboardInterrupt:
        return "score: stopped by Ctrl-C"
    except Exception as error:  # a user's function may raise anything; the chat continues
        hint = "; a chat has no columns of a data set" if isinstance(error, KeyError) else ""
        return f"no score: {type(error).__name__}: {printable(str(error))[:200]}{hint}"
    parts = ", ".join(f"{name} {float(column[0]):.3f}" for name, column in found.components.items())
    return f"score {float(found.sums[0]):.3f}" + (f" ({printable(parts)})" if parts else "")


def check_reward(section: dict[str, Any], tokenizers: Sequence[Tokenizer]) -> None:
    """Raises UserError for a mistake in the reward, without loading the weights of its models."""
    for key, function in function_rewards(section, "reward"):
        load_function(function["path"], f"{key}.path")
    models = list(reward_models(section))
    for key, model in models:
        config_of(ModelConfig(**model), f"{key}.path")
    if not models and section["_target_"].startswith(OWN):
        for tokenizer in tokenizers:
            bind(section, "reward")(tokenizer=tokenizer, reduce=lambda tensor: tensor)


def load_partners(
    config: Config,
    world: World,
    models: Sequence[NamedModel],
    *,
    with_reward: bool,
    greedy: bool,
    note: Callable[[str], None],
) -> list[Partner]:
    """Loads the models, their tokenizers and the reward.

    Raises UserError, if possible before any weights are loaded.
    """
    hub = hub_models(config, models)
    download_files(hub, world)
    tokenizers = [tokenizer_of(config, model) for model in models]
    for model in models:
        config_of(model_section(config, model), model.key)  # raises UserError if there is no such model
    if with_reward:
        check_reward(config.reward, tokenizers)
    download_weights([entry for entry in hub if entry.path in {model.path for model in models}], world)
    load_frozen, partners = RewardModels(world, note), []
    for model, tokenizer in zip(models, tokenizers, strict=True):
        note(f"loading    {model.name}: {model.adapter or model.path}")
        policy = load_decoder(config, model, tokenizer)
        freeze(policy, world=world, offload=False, deepspeed_config=None)
        sampling = build_sampling(config, stop_ids(config, tokenizer), config.sampling.temperature)
        reward = None
        if with_reward:
            reward = build_reward(
                config.reward,
                tokenizer=tokenizer,
                load_frozen=load_frozen,
                score_tokens=TokenBudget("score_tokens", CPU_LIMITS["score_tokens"]),
                all_reduce_max=world.max_int,
                reduce=world.sum,
                should_stop=lambda: False,
                note=note,
            )
        partners.append(
            Partner(model.name, policy, tokenizer, sampling.as_greedy() if greedy else sampling, reward)
        )
        if not tokenizer.has_chat_template:
            note(
                f"{model.name} has no chat template: it continues each message as plain text, without a "
                "system message and without the earlier messages"
            )
    return partners


def run_chat(chat: Chat, read_line: Callable[[], str | None]) -> None:
    """Handles lines of input until /quit or the end of the input.

    ``read_line`` returns None at the end of the input, and raises KeyboardInterrupt for Ctrl-C.
    """
    while True:
        try:
            line = read_line()
        except KeyboardInterrupt:
            chat.view.note("(Ctrl-D or /quit ends the chat)")
            continue
        if line is None:
            return
        while line.endswith("\\"):
            more = None
            with suppress(KeyboardInterrupt):
                more = read_line()
            line = line[:-1] + "\n" + (more or "")
            if more is None:
                break
        try:
            if not chat.reply(line):
                return
        except KeyboardInterrupt:
            chat.view.note("(stopped)")
