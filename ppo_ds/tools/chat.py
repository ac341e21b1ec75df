"""Implements the chat with policies on the console: conversations, commands, streamed answers, scores.

All models receive the same messages, but each has a separate conversation and sees only its own answers.
The models answer one after the other, with the same random numbers. The same seed and input repeat a chat.
"""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ppo_ds.assemble.data import stop_ids
from ppo_ds.assemble.ppo import build_sampling
from ppo_ds.assemble.reward_models import RewardModels
from ppo_ds.config.schema import PPOConfig
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import freeze
from ppo_ds.errors import UserError, printable
from ppo_ds.models.download import download_files, download_weights
from ppo_ds.models.loading import config_of
from ppo_ds.models.policy import Policy
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.planning.budgets import CPU_LIMITS
from ppo_ds.rollout.base import SamplingParams, truncate_at_stop
from ppo_ds.rollout.streaming import stream_response
from ppo_ds.storage.drafts import write_file
from ppo_ds.tools.loading import hub_models, load_decoder, load_reward, model_section, tokenizer_of
from ppo_ds.tools.model_argument import NamedModel
from ppo_ds.tracking.formatting import format_number
from ppo_ds.types import Prompts, Reward

HELP = """\
/system TEXT   sets the system message and begins a new conversation
/reset         begins a new conversation
/save FILE     writes the conversations as JSON lines with "messages", which stage=sft can train on
/quit          ends the chat, as Ctrl-D does
Ctrl-C stops an answer. //TEXT sends /TEXT."""
JOINERS = "\u200c\u200d"  # Persian and emoji need them


@dataclass
class Partner:
    """A model and its conversation."""

    name: str
    policy: Policy
    tokenizer: Tokenizer
    sampling: SamplingParams
    reward: Reward | None
    messages: list[Message] = field(default_factory=list)

    def prompt(self) -> tuple[str, list[int]]:
        """Returns the text and the ids that the model continues.

        Without a chat template, the text is the last message. Raises UserError if it has no tokens, if the
        template rejects the conversation, or if the model has no positions left for an answer.
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


@dataclass
class Chat:
    """A conversation with one or several models, driven by lines of input."""

    partners: Sequence[Partner]
    console: Console
    seed: int
    system: str | None = None
    turns: int = 0  # messages of the user so far, in all conversations

    def reply(self, line: str) -> bool:
        """Handles a line of input; returns False if it ends the chat."""
        name, _, rest = line.strip().partition(" ")
        match name:
            case "":
                pass
            case "/quit":
                return False
            case "/help":
                note(self.console, HELP)
            case "/reset":
                self.reset()
            case "/system":
                self.system = rest.strip() or None
                self.reset()
            case "/save":
                note(self.console, self.save(Path(rest.strip())))
            case _ if name[0] == "/" and name[:2] != "//":
                note(self.console, f"{name}: no such command; /help lists them, and /{name} sends it")
            case _:
                self.say(line.strip()[1:] if name[0] == "/" else line)
        return True

    def reset(self) -> None:
        for partner in self.partners:
            partner.messages.clear()
        about = f"with the system message: {self.system}" if self.system else "without a system message"
        note(self.console, f"a new conversation {about}")

    def save(self, path: Path) -> str:
        """Writes one JSON line per model to ``path``; returns a line for the console."""
        rows = [{"model": one.name, "messages": one.messages} for one in self.partners if one.messages]
        try:
            path = path.expanduser()
            if path.exists():
                return f"{path}: exists; give the name of another file, as in /save chat.jsonl"
            if not rows:
                return "nothing was said yet"
            write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, or ~ of a user that does not exist
            reason = getattr(error, "strerror", None) or error
            return f"{str(path)[:200]}: cannot be written: {reason}; choose another name"
        return f"saved in {path}"

    def say(self, text: str) -> None:
        """Sends a message to every model and shows the answers. An interrupt stops the current answer."""
        self.turns += 1
        for partner in self.partners:
            if len(self.partners) > 1:
                note(self.console, partner.name, "bold cyan")
            before = len(partner.messages)
            if not before and self.system and partner.tokenizer.has_chat_template:
                partner.messages.append({"role": "system", "content": self.system})
            partner.messages.append({"role": "user", "content": text})
            torch.manual_seed(self.seed + self.turns)
            try:
                answer, summary = respond(partner, self.show)
            except UserError as error:
                del partner.messages[before:]
                note(self.console, str(error))
            else:
                partner.messages.append({"role": "assistant", "content": answer})
                self.show("" if answer.endswith("\n") else "\n")
                note(self.console, summary, "dim")

    def show(self, piece: str) -> None:
        self.console.file.write(displayable(piece))
        self.console.file.flush()


def respond(partner: Partner, show: Callable[[str], None]) -> tuple[str, str]:
    """Generates an answer, shown piece by piece with ``show``; returns it and a line of score and speed."""
    text, ids = partner.prompt()
    limit = min(partner.sampling.max_new_tokens, (partner.policy.max_tokens or 2**31) - len(ids))
    sampling, start = replace(partner.sampling, max_new_tokens=limit), time.perf_counter()
    try:
        made, interrupted = stream_response(partner.policy.lm, ids, sampling, partner.tokenizer, show)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{partner.name}: out of memory; /reset, or lower sampling.max_new_tokens") from error
    seconds, answer = time.perf_counter() - start, partner.tokenizer.decode(made)
    finished = {*sampling.stop_token_ids} & {*made[-1:]} or any(s in answer for s in sampling.stop_strings)
    parts = [
        score(partner, text, ids, made, sampling) if made else "",
        f"{len(made)} tokens",
        "stop" if finished else "stopped by Ctrl-C" if interrupted else "length",
        f"{len(made) / seconds:.1f} tokens/s",
    ]
    return answer, " · ".join(part for part in parts if part)


def score(
    partner: Partner, text: str, prompt: list[int], response: list[int], sampling: SamplingParams
) -> str:
    """Returns the score of an answer in words, or why the reward cannot score it; empty without a reward."""
    if partner.reward is None:
        return ""
    row: dict[str, Any] = {"prompt_text": text, "data_source": "chat"}
    if partner.tokenizer.has_chat_template:
        row["messages"] = [dict(message) for message in partner.messages]
    ids, tokens = torch.tensor([prompt]), torch.tensor([response])
    prompts = Prompts(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([len(response)]), (row,))
    rollout = truncate_at_stop(
        prompts, tokens, torch.zeros(tokens.shape), sampling=sampling, tokenizer=partner.tokenizer
    )
    try:
        found = partner.reward(rollout)
    except KeyboardInterrupt:
        return "score: stopped by Ctrl-C"
    except Exception as error:  # a user's function may raise anything; the chat continues
        hint = "; a chat has no columns of a data set" if isinstance(error, KeyError) else ""
        return f"no score: {type(error).__name__}: {printable(str(error))[:200]}{hint}"
    columns = {"score": found.sums, **found.components}
    total, *parts = (f"{name} {format_number(float(column[0]), '.3f')}" for name, column in columns.items())
    return f"{total} ({printable(', '.join(parts))})" if parts else total


def note(console: Console, text: str, style: str = "yellow") -> None:
    """Shows lines that are not part of the conversation."""
    console.print(Text(displayable(text), style=style), soft_wrap=True)


def displayable(text: str) -> str:
    """Escapes the characters of a text that could control a terminal; keeps line breaks."""
    return "".join(
        c if c.isprintable() or c in f"\n\t{JOINERS}" or unicodedata.category(c) == "Zs" else printable(c)
        for c in text
    )


def load_partners(
    config: PPOConfig,
    world: World,
    models: Sequence[NamedModel],
    *,
    with_reward: bool,
    greedy: bool,
    note: Callable[[str], None],
) -> list[Partner]:
    """Loads the tokenizers, the reward and the models; checks all arguments before a model is loaded."""
    hub = hub_models(config, models)
    download_files(hub, world)
    tokenizers = [tokenizer_of(config, model) for model in models]
    for model in models:
        config_of(model_section(config, model), model.key)
    load_frozen, budget = RewardModels(world, note), CPU_LIMITS["score_tokens"]
    rewards = [
        load_reward(
            config.reward, "reward", tokenizer, config.sampling.temperature, world, load_frozen, budget, note
        )
        if with_reward
        else None
        for tokenizer in tokenizers
    ]
    download_weights([entry for entry in hub if entry.path in {model.path for model in models}], world)
    partners = []
    for model, tokenizer, reward in zip(models, tokenizers, rewards, strict=True):
        note(f"loading    {model.name}: {model.adapter or model.path}")
        policy = load_decoder(config, model, tokenizer)
        freeze(policy, world=world, offload=False, deepspeed_config=None)
        sampling = build_sampling(config, stop_ids(config, tokenizer), config.sampling.temperature)
        sampling = sampling.as_greedy() if greedy else sampling
        partners.append(Partner(model.name, policy, tokenizer, sampling, reward))
        if not tokenizer.has_chat_template:
            note(
                f"{model.name} has no chat template: it continues each message as plain text, without a "
                "system message and without the earlier messages"
            )
    return partners


def run_chat(chat: Chat, read_line: Callable[[], str | None]) -> None:
    """Handles lines of input until /quit, or until ``read_line`` returns None. Ctrl-C does not end it."""
    while True:
        try:
            line = read_line()
            if line is None or not chat.reply(line):
                return
        except KeyboardInterrupt:
            note(chat.console, "\n(Ctrl-D or /quit ends the chat)")
