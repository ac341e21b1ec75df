"""Tests responses of several turns: their tokens, masks, rewards and ends, worked by hand."""

from concurrent.futures import Future
from threading import Event

import numpy as np
import pytest
import torch

from ppo_ds.environments.base import InvalidResult, read_step
from ppo_ds.ppo.experience_metrics import count_turns
from tests.environments.conftest import END, Scripted, sampling_of


class Adder:
    """Answers "?a+b" with the sum, with a reward of 0.25, and scores any other turn with 1 or 0."""

    def reset(self, row):
        self.answer = row["answer"]

    def step(self, answer):
        if answer.startswith("?"):
            return f">{sum(map(int, answer[1:].split('+')))}=", 0.25, False
        return "", float(answer == self.answer), True


def test_a_response_of_two_turns_by_hand(generator_of, prompts_of):
    """The second row is done after one turn. Ids are 3 + the index of a character in the vocabulary."""
    script = {"1+2=": "?1+2", "1+2=?1+2<eos>>3=": "3", "4+4=": "8"}
    generate = generator_of(Adder, script)
    rollout = generate(prompts_of("1+2=", "4+4=", answer="3"), sampling_of(20))
    #            ?   1   +   2  eos  >   3   =   3  eos
    assert rollout.response_ids.tolist() == [
        [15, 4, 13, 5, END, 16, 6, 14, 6, END],
        [11, END, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert rollout.feedback_mask.int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 0, 0], [0] * 10]
    assert rollout.response_mask.int().tolist() == [[1, 1, 1, 1, 1, 0, 0, 0, 1, 1], [1, 1] + [0] * 8]
    assert rollout.response_attention.int().tolist() == [[1] * 10, [1, 1] + [0] * 8]
    assert (rollout.logprobs * -8).tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 1, 2], [1, 2] + [0] * 8]
    assert rollout.turn_rewards.tolist() == [[0, 0, 0, 0, 0.25, 0, 0, 0, 0, 1.0], [0] * 10]
    assert rollout.finished.tolist() == [True, True] and rollout.episode_ends == ("done", "done")
    assert rollout.prompt_lengths.tolist() == [4, 4] and rollout.limits.tolist() == [20, 20]
    assert rollout.generated_lengths.tolist() == [7, 2]
    assert count_turns(rollout.feedback_mask, rollout.response_lengths).tolist() == [2, 1]
    # the second call only has the row that is not done, with exactly the tokens that were sampled
    assert generate.backend.calls == [["1+2=", "4+4="], ["1+2=?1+2<eos>>3="]]


@pytest.mark.parametrize(
    ("limit", "length", "end"),
    [
        (5, 5, "length"),  # the turn fits exactly, nothing is left for the feedback
        (8, 5, "length"),  # the feedback would fill the limit
        (9, 9, "length"),  # one token of the second turn, which is cut
        (10, 10, "done"),
        (4, 4, "length"),  # the first turn is cut, so the environment does not get it
    ],
)
def test_the_limit_counts_the_feedback(generator_of, prompts_of, limit, length, end):
    script = {"1+2=": "?1+2", "1+2=?1+2<eos>>3=": "3"}
    rollout = generator_of(Adder, script)(prompts_of("1+2=", answer="3"), sampling_of(limit))
    assert (rollout.response_lengths.tolist(), rollout.episode_ends) == ([length], (end,))
    assert rollout.finished.tolist() == [end == "done"]
    assert rollout.turn_rewards.sum().item() == (0 if limit == 4 else 0.25 + (end == "done"))


def test_the_last_turn_still_gets_its_reward(generator_of, prompts_of):
    script = {"1+2=": "?1+2", "1+2=?1+2<eos>>3=": "?3+3"}
    rollout = generator_of(Adder, script, max_turns=2)(prompts_of("1+2=", answer="3"), sampling_of(50))
    assert rollout.episode_ends == ("turns",) and rollout.finished.tolist() == [False]
    assert rollout.turn_rewards[0].tolist() == [0, 0, 0, 0, 0.25, 0, 0, 0, 0, 0, 0, 0, 0.25]


# -- errors ----------------------------------------------------------------------------------------------


class Fragile(Adder):
    """Fails if the turn is a, b, c or abc, each in another way."""

    def step(self, answer):
        failures = {
            "a": lambda: 1 / 0,
            "b": lambda: exit(3),
            "c": lambda: ("no tuple",),
            "abc": self.wait_for_a_cancelled_task,
        }
        return failures[answer]() if answer in failures else super().step(answer)

    def wait_for_a_cancelled_task(self):
        task = Future()
        task.cancel()
        return task.result()  # raises concurrent.futures.CancelledError


def test_an_error_ends_its_response_only(generator_of, prompts_of, caplog):
    script = {"1=": "a", "2=": "b", "3=": "c", "4=": "abc", "5=": "?2+3", "5=?2+3<eos>>5=": "5"}
    prompts = prompts_of("1=", "2=", "3=", "4=", "5=", answer="5")
    rollout = generator_of(Fragile, script)(prompts, sampling_of(20))
    assert rollout.episode_ends == ("error", "error", "error", "error", "done")
    assert rollout.finished.tolist() == [False, False, False, False, True]
    assert rollout.response_lengths.tolist() == [2, 2, 2, 4, 10]
    assert rollout.turn_rewards.sum(1).tolist() == [0, 0, 0, 0, 1.25]
    (record,) = caplog.records  # only the first error is logged
    assert "the environment raised ZeroDivisionError: division by zero at " in record.getMessage()
    assert "for the prompt '1='" in record.getMessage()


def test_an_error_in_reset_gives_an_empty_response(generator_of, prompts_of):
    class Picky(Adder):
        def reset(self, row):
            if row["prompt_text"] == "1=":
                raise KeyError("answer")
            super().reset(row)

    rollout = generator_of(Picky, {"2=": "4"})(prompts_of("1=", "2=", answer="4"), sampling_of(20))
    assert rollout.episode_ends == ("error", "done")
    assert rollout.response_lengths.tolist() == [0, 2]
    assert not rollout.response_mask[0].any() and not rollout.finished[0]
    all_fail = generator_of(Picky, {})
    rollout = all_fail(prompts_of("1=", answer="4"), sampling_of(20))
    assert rollout.response_width == 1 and all_fail.backend.calls == []


def test_a_turn_with_an_error_has_no_reward(generator_of, prompts_of, tokenizer):
    """The template refuses the feedback, after the environment has returned a reward."""
    tokenizer.hf.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if '>' in m.content %}{{ raise_exception('no') }}"
        "{% endif %}{% endfor %}"
    )
    prompts = prompts_of("1=", answer="2", messages=[{"role": "user", "content": "1="}])
    rollout = generator_of(Adder, {"1=": "?1+1"})(prompts, sampling_of(20))
    assert rollout.episode_ends == ("error",) and rollout.turn_rewards.sum().item() == 0


@pytest.mark.parametrize("columns", [{}, {"messages": [{"role": "user", "content": "1="}]}])
def test_text_that_is_not_unicode_ends_its_response_only(
    generator_of, prompts_of, tokenizer, caplog, columns
):
    """The output of a program, decoded with ``surrogateescape``, in rows without and with a chat."""

    class Shell(Adder):
        def step(self, answer):
            return ("out \udcff", 0.5, False) if answer == "a" else super().step(answer)

    tokenizer.hf.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    generate = generator_of(Shell, {"1=": "a", "2=": "4"})
    rollout = generate(prompts_of("1=", "2=", answer="4", **columns), sampling_of(20))
    assert rollout.episode_ends == ("error", "done")
    assert rollout.turn_rewards.sum(1).tolist() == [0, 1]
    assert (
        "the environment returned 'out \\udcff' as the content of a message, which is not valid Unicode: a "
        "lone surrogate at character 5, for the prompt '1='"
    ) in caplog.text


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_a_prompt_that_is_not_unicode_ends_its_response_only(generator_of, prompts_of, tokenizer, template):
    class Told(Adder):
        def reset(self, row):
            super().reset(row)
            return [{"role": "user", "content": "\ud800"}] if row["prompt_text"] == "1=" else None

    tokenizer.hf.chat_template = template
    rollout = generator_of(Told, {"2=": "4"})(prompts_of("1=", "2=", answer="4"), sampling_of(20))
    assert rollout.episode_ends == ("error", "done")


def test_a_call_that_exceeds_its_time_limit_ends_the_response(generator_of, prompts_of):
    class Slow(Adder):
        def step(self, answer):
            if answer == "a":
                forever.wait()
            return super().step(answer)

    forever = Event()
    generate = generator_of(Slow, {"1=": "a", "2=": "4"}, timeout_seconds=0.5)
    rollout = generate(prompts_of("1=", "2=", answer="4"), sampling_of(20))
    forever.set()
    assert rollout.episode_ends == ("timeout", "done")


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("text", "returned 'text' (str), which is not (feedback, reward, done)"),
        (("a", float("nan"), False), "returned the reward 'nan' (float), which is not a finite number"),
        (("a", "1", False), "returned the reward '1' (str), which is not a finite number"),
        (("a", 1.0, 0), "returned done = '0' (int), which is neither True nor False"),
        (("", 1.0, False), "returned no feedback although the episode is not done"),
        ((None, 1.0, False), "returned no feedback although the episode is not done"),
        ((["a"], 1.0, False), "returned 'a' (str) as a message; it must have the texts role and content"),
        (
            ([{"role": "user", "content": "a", "tool_calls": []}], 1.0, False),
            "returned '[]' (list) as the tool_calls of a message; remove it, or write it as a text",
        ),
        ((3, 1.0, False), "returned '3' (int), which is not a list of messages"),
    ],
)
def test_results_that_are_refused(result, problem):
    with pytest.raises(InvalidResult) as caught:
        read_step(result)
    assert str(caught.value) == problem


def test_rewards_and_ends_may_be_of_other_number_types():
    assert read_step((None, np.float32(0.5), True)).reward == 0.5
    assert read_step(("a", 1, False)).feedback == ({"role": "user", "content": "a"},)


def test_other_texts_of_a_message_are_kept_for_the_template():
    message = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "7"}
    assert read_step(([message], 1, False)).feedback == (message,)


# -- prompts, random numbers, stops --------------------------------------------------------------------------


def test_reset_may_give_the_prompt(generator_of, prompts_of):
    class Told(Adder):
        def reset(self, row):
            super().reset(row)
            return [{"role": "user", "content": "9+"}, {"role": "user", "content": row["prompt_text"]}]

    generate = generator_of(Told, {"9+1=": "10", "+1=": "10"})
    rollout = generate(prompts_of("1=", answer="10"), sampling_of(20))
    assert generate.backend.calls == [["9+1="]]
    assert rollout.metadata[0]["prompt_text"] == "9+1=" and rollout.prompt_lengths.tolist() == [4]
    short = generator_of(Told, {"+1=": "10"}, max_prompt_tokens=3)
    assert short(prompts_of("1=", answer="10"), sampling_of(20)).prompt_lengths.tolist() == [3]


def test_an_environment_does_not_change_what_the_run_samples_next(generator_of, prompts_of):
    class Random(Adder):
        def step(self, answer):
            torch.rand(3)
            return super().step(answer)

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    generator_of(Random, {"1=": "1"})(prompts_of("1=", answer="1"), sampling_of(9))
    assert torch.equal(torch.rand(1), expected)


def test_the_environment_may_change_its_row(generator_of, prompts_of):
    class Changing(Adder):
        def reset(self, row):
            super().reset(row)
            row.clear()

    rollout = generator_of(Changing, {"1=": "1"})(prompts_of("1=", answer="1"), sampling_of(9))
    assert rollout.metadata == ({"prompt_text": "1=", "answer": "1"},)


def test_a_stop_request_ends_the_generation_between_two_turns(generator_of, prompts_of, tokenizer):
    class Stopped(Exception):
        pass

    backend = Scripted(tokenizer, {"1=": "?1+1"})

    def check():
        if backend.calls:
            raise Stopped

    with pytest.raises(Stopped):
        generator_of(Adder, backend, check=check)(prompts_of("1=", answer="1"), sampling_of(9))
    assert len(backend.calls) == 1


def test_a_rank_whose_rows_are_done_decodes_a_filler(generator_of, prompts_of, world):
    """The other rank, which the stand-in for the collective plays, has active rows in three turns."""
    active_elsewhere = iter([1, 1, 1, 0])
    world.max_int = lambda n: max(n, next(active_elsewhere))
    generate = generator_of(Adder, {"1=": "1"}, max_turns=5)
    rollout = generate(prompts_of("1=", answer="1"), sampling_of(9))
    assert generate.backend.calls == [["1="]] * 3
    assert rollout.response_lengths.tolist() == [2] and rollout.episode_ends == ("done",)
