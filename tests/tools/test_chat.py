"""Tests the chat: streamed answers, history, commands, interrupts, scores, and what reaches the terminal."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.chat import parse
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.models.policy import Policy
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.rollout.streaming import Streamer
from ppo_ds.tools.chat import Chat, Partner, displayable, load_partners, run_chat
from ppo_ds.tracking.screen import open_console
from ppo_ds.types import Prompts, Scores
from tests.ppo.conftest import ThreadWorld

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}|{% endfor %}"
EVIL = "\x1b]0;title\x07\x1b[2Jx\r\u202ey"


def sampling(**changes: Any) -> SamplingParams:
    values = {
        "max_new_tokens": 6, "min_new_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 1,
        "stop_token_ids": (), "stop_strings": (),
    }  # fmt: skip
    return SamplingParams(**values | changes)


def partner(name: str = "tiny", seed: int = 0, template: str | None = TEMPLATE, **changes: Any) -> Partner:
    tokenizer = tiny.character_tokenizer("abcsu|")
    torch.manual_seed(seed)
    lm = tiny.tiny_llama(tokenizer, hidden_size=16, layers=1, heads=2, max_tokens=64)
    with torch.no_grad():
        lm.lm_head.weight.mul_(30.0)  # far from ties
    tokenizer.hf.chat_template = template
    policy = Policy(lm.eval(), 1.0)
    return Partner(name, policy, tokenizer, sampling(**changes), None)


def answer_of(one: Partner, text: str) -> str:
    """Returns the greedy answer to a text, by the decode backend of the training."""
    (ids,) = one.tokenizer.encode_many([text], special_tokens=one.tokenizer.has_chat_template is False)
    prompt = torch.tensor([ids])
    prompts = Prompts(prompt, torch.ones_like(prompt, dtype=torch.bool), torch.tensor([64]), ({},))
    backend = HFGenerator(lambda: one.policy.lm, tokenizer=one.tokenizer, token_budget=999)
    rollout = backend(prompts, one.sampling)
    return one.tokenizer.decode(rollout.response_ids[0][rollout.response_mask[0]].tolist())


def chat(*partners: Partner, lines: list[str | type], system: str | None = None) -> tuple[Chat, str]:
    """Runs a chat with these lines of input; KeyboardInterrupt stands for Ctrl-C at the prompt."""
    out, remaining = io.StringIO(), list(lines)

    def read() -> str | None:
        line = remaining.pop(0) if remaining else None
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    made = Chat(partners, open_console(out), seed=0, system=system)
    run_chat(made, read)
    return made, out.getvalue()


def test_an_answer_is_that_of_the_decode_backend_and_the_history_is_read() -> None:
    one = partner()
    made, shown = chat(one, lines=["ab", "c"], system="ba")
    first = answer_of(one, "sba|uab|")
    second = answer_of(one, f"sba|uab|a{first}|uc|")
    assert [message["content"] for message in one.messages] == ["ba", "ab", first, "c", second]
    assert [message["role"] for message in one.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert f"{first}\n6 tokens · length" in shown and second in shown


def test_two_models_have_their_own_answers() -> None:
    one, two = partner("one", 0), partner("two", 1)
    _, shown = chat(one, two, lines=["ab"])
    answers = [answer_of(each, "uab|") for each in (one, two)]
    assert answers[0] != answers[1] and [each.messages[-1]["content"] for each in (one, two)] == answers
    assert shown.index(f"one\n{answers[0]}\n") < shown.index(f"two\n{answers[1]}\n")


def test_a_base_model_continues_each_message_as_text() -> None:
    one = partner(template=None)
    _, _ = chat(one, lines=["ab", "ca"], system="unused")
    assert [one.messages[1]["content"], one.messages[3]["content"]] == [
        answer_of(one, "ab"),
        answer_of(one, "ca"),
    ]


@pytest.mark.parametrize("name", ["a\0b", "~no-such-user/x", "x" * 5_000, "/proc/x", "/dev/null/x"])
def test_a_name_that_no_file_can_have_does_not_end_the_chat(name: str) -> None:
    one = partner()
    _, shown = chat(one, lines=["ab", f"/save {name}", "c"])
    assert len(one.messages) == 4 and displayable(name[:200]) in shown and len(shown) < 2_000
    assert ": cannot be written: " in shown and "; choose another name" in shown and "\0" not in shown


def test_commands(tmp_path: Path) -> None:
    one, file = partner(), tmp_path / "chat.jsonl"
    made, shown = chat(
        one, lines=["/save", f"/save {file}", "ab", f"/save {file}", f"/save {file}",
                    "/system ba", "//c", "/nothing", "/help", "", "/quit", "never"],
    )  # fmt: skip
    for expected in (
        ".: exists; give the name", "nothing was said yet",
        f"saved in {file}", f"{file}: exists; give the name of another file", "with the system message: ba",
        "/nothing: no such command", "/reset         begins a new conversation",
    ):  # fmt: skip
        assert expected in shown
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    first = answer_of(one, "uab|")
    assert row == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": first}],
    }
    assert [message["content"] for message in one.messages[:2]] == ["ba", "/c"] and made.turns == 2


def test_a_seed_repeats_the_chat_and_each_turn_draws_other_numbers() -> None:
    def sampled() -> list[str]:
        one = partner(top_k=0, temperature=30.0, max_new_tokens=20)
        one.policy.temperature = 30.0
        chat(one, lines=["ab"])
        first = one.messages[-1]["content"]
        one.messages.clear()
        chat(one, lines=["ab", "/reset", "ab"])
        return [first, one.messages[-1]["content"]]

    found = sampled()
    assert found == sampled() and found[0] != found[1]


def test_an_interrupt_stops_the_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    one, whole, put = partner(), answer_of(partner(), "uab|"), Streamer.put

    def interrupted(self: Streamer, value: Any) -> None:
        put(self, value)
        if len(self.ids) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Streamer, "put", interrupted)
    _, shown = chat(one, lines=[KeyboardInterrupt, "ab"])
    assert "Ctrl-D or /quit ends the chat" in shown
    answer = one.messages[-1]["content"]
    assert whole.startswith(answer) and 0 < len(answer) < len(whole)
    assert f"\n{answer}\n3 tokens · stopped by Ctrl-C" in shown


def test_a_conversation_that_is_too_long_is_one_line_and_the_chat_goes_on() -> None:
    one = partner()
    _, shown = chat(one, lines=["a" * 70, "ab"])
    assert "tiny: the conversation has 72 tokens, and the model has only 64 positions; /reset begins" in shown
    assert [message["content"] for message in one.messages] == ["ab", answer_of(one, "uab|")]


def test_control_characters_are_escaped() -> None:
    assert displayable(EVIL) == r"\x1b]0;title\x07\x1b[2Jx\r\u202ey"
    usual = "größer → 漢字\u3000✓\n\tأ\u200cب 👩\u200d👧 a\xa0b"
    assert displayable(usual) == usual
    out = io.StringIO()
    made = Chat([], open_console(out), seed=0)
    made.reply(f"/system {EVIL}")
    made.show(EVIL)
    assert out.getvalue().count("\\x1b]0;title") == 2 and out.getvalue().replace("\n", "").isprintable()


def test_scores_are_shown_and_an_error_of_a_reward_is_one_line() -> None:
    def reward(rollout: Any) -> Scores:
        length = rollout.response_mask.sum(1).float()
        assert [m["content"] for m in rollout.metadata[0]["messages"]] == ["ab"]
        return Scores(length / 2, torch.zeros(rollout.response_mask.shape), {"length": length})

    one = partner()
    one.reward = reward
    assert "score 3.000 (length 6.000) · 6 tokens" in chat(one, lines=["ab"])[1]

    def broken(rollout: Any) -> Scores:
        return rollout.metadata[0]["answer"]

    two = partner()
    two.reward = broken
    assert "no score: KeyError: 'answer'; a chat has no columns" in chat(two, lines=["ab", "c"])[1]
    assert len(two.messages) == 4


def test_the_command_line(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    models = [str(tmp_path / name) for name in ("one", "two")]
    wanted = parse([*models, "--greedy", "reward=length", "reward.longest=9", "sampling.top_p=0.9"])
    assert [model.name for model in wanted.models] == ["one", "two"] and wanted.greedy and wanted.with_reward
    assert wanted.config.reward["longest"] == 9 and wanted.config.sampling.top_p == 0.9
    assert wanted.config.sampling.max_new_tokens == 512 and not parse(models[:1]).with_reward
    for arguments, line in (
        ([], "^MODEL: 0 are given"),
        ([*models, str(tmp_path)], "^MODEL: 3 are given"),
        ([str(tmp_path / "none")], "none: no such folder"),
        ([models[0], "sampling.top_k=x"], "^sampling.top_k=x: must be a whole number"),
        ([models[0], "actor.model.revision=v1"], "^actor.model.revision=v1: a chat loads the newest"),
        ([models[0], "reward=lenght"], "lenght: no such reward.*did you mean length"),
    ):
        with pytest.raises(UserError, match=line):
            parse(arguments)


def test_all_arguments_are_checked_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("ppo_ds.tools.loading.load_policy", refuse)
    for name in ("one", "two"):
        model = partner().policy.lm
        tiny.character_tokenizer("abcsu|").hf.save_pretrained(tmp_path / name)
        model.config.save_pretrained(tmp_path / name)
    (tmp_path / "score.py").write_text("def score(prompts, responses, rows):\n    return [0.0]\n")
    good = [str(tmp_path / "one"), str(tmp_path / "two")]

    def load(*arguments: str) -> None:
        wanted = parse([*good, *arguments])
        load_partners(
            wanted.config,
            ThreadWorld(0, 1, threading.Barrier(1), [None]),
            wanted.models,
            with_reward=wanted.with_reward,
            greedy=False,
            note=lambda line: None,
        )

    for arguments, line in (
        (["reward=length"], "^reward.longest is missing"),
        (["reward=function", f"reward.path={tmp_path}/scoore.py:score"], "no such file; did you mean .*"),
        (["reward=function", f"reward.path={tmp_path}/score.py:scor"], "has no scor"),
    ):
        with pytest.raises(UserError, match=line):
            load(*arguments)
    for arguments in (
        [],
        ["reward=length", "reward.longest=9"],
        ["reward=function", f"reward.path={tmp_path}/score.py:score"],
    ):
        with pytest.raises(AssertionError, match="a model is loaded"):
            load(*arguments)
    (tmp_path / "two" / "config.json").write_text("{")
    with pytest.raises(UserError, match="two"):
        load()


@pytest.mark.parametrize("greedy", [True, False])
def test_loaded_models_are_sampled_or_greedy_and_base_models_are_announced(
    tmp_path: Path, greedy: bool
) -> None:
    tokenizer, said = tiny.character_tokenizer("abcsu|"), []
    tiny.save(partner().policy.lm, tokenizer, tmp_path / "one")
    wanted = parse([str(tmp_path / "one"), "sampling.top_p=0.5", *["--greedy"] * greedy])
    world = ThreadWorld(0, 1, threading.Barrier(1), [None])
    (one,) = load_partners(
        wanted.config, world, wanted.models, with_reward=False, greedy=wanted.greedy, note=said.append
    )
    assert one.sampling == (one.sampling.as_greedy() if greedy else replace(one.sampling, top_p=0.5))
    assert said[-1].startswith("one has no chat template: it continues each message as plain text")
