"""Tests responses that do not wait for the tools of other responses: their order, tokens, ends and ranks."""

import asyncio
import threading

import pytest
import torch

from ppo_ds.environments.base import is_asynchronous, load_environment
from ppo_ds.ppo.minibatches import concatenate
from tests.environments.conftest import Scripted, sampling_of
from tests.environments.test_backends import NAMES, STOPS, decode, lm  # noqa: F401
from tests.ppo.conftest import ThreadWorld
from tests.support.threads import run_threads

# three turns each: a, b and c
SCRIPT = {f"{n}={before}": turn for n in "123" for before, turn in
          {"": "a", "a<eos>0": "b", "a<eos>0b<eos>0": "c"}.items()}  # fmt: skip


class Gate:
    """Counts the episodes that have ended, and lets those wait that are to be the last."""

    def __init__(self, others: int):
        self.others, self.opened, self.lock = others, threading.Event(), threading.Lock()

    def ended(self) -> None:
        with self.lock:
            self.others -= 1
            if self.others == 0:
                self.opened.set()


def waiting(gate: Gate, is_async: bool):
    """Makes an environment whose first call for the prompt "1=" ends only once all others have ended."""

    class Plain:
        def reset(self, row):
            self.is_slow = row["prompt_text"] == "1="

        def step(self, answer):
            if self.is_slow and answer == "a":
                gate.opened.wait()
            if answer == "c" and not self.is_slow:
                gate.ended()
            return "0", 0.5, answer == "c"

    class Async(Plain):
        async def reset(self, row):
            await asyncio.sleep(0)
            super().reset(row)

        async def step(self, answer):
            return await asyncio.to_thread(super().step, answer)

    return Async if is_async else Plain


@pytest.mark.parametrize("is_async", [True, False])
def test_a_slow_tool_delays_its_own_response_only(generator_of, prompts_of, is_async):
    """If the others waited for it, nobody would open the gate, and its response would end with a time-out."""
    environment = waiting(Gate(2), is_async)
    generate = generator_of(environment, SCRIPT, independent=True, timeout_seconds=20.0)
    rollout = generate(prompts_of("1=", "2=", "3="), sampling_of(20))
    assert rollout.episode_ends == ("done",) * 3 and rollout.turn_rewards.sum(1).tolist() == [1.5] * 3
    assert rollout.response_lengths.tolist() == [8, 8, 8]  # a <eos> 0 b <eos> 0 c <eos>
    first, *later = generate.backend.calls
    assert first == ["1=", "2=", "3="] and later[:2] == [["2=a<eos>0", "3=a<eos>0"], [
        "2=a<eos>0b<eos>0", "3=a<eos>0b<eos>0"]]  # fmt: skip
    assert later[2:] == [["1=a<eos>0"], ["1=a<eos>0b<eos>0"]]


def test_turns_that_are_taken_together_wait_for_the_slowest(generator_of, prompts_of):
    generate = generator_of(waiting(Gate(2), True), SCRIPT, independent=False, timeout_seconds=0.5)
    rollout = generate(prompts_of("1=", "2=", "3="), sampling_of(20))
    assert rollout.episode_ends == ("timeout", "done", "done")


def test_async_methods_make_rows_independent(tmp_path):
    code = "class Mine:\n    def reset(self, row): ...\n    async def step(self, answer): ..."
    for name, source in {"a": code, "b": code.replace("async ", "")}.items():
        (tmp_path / f"{name}.py").write_text(source)
    kinds = [load_environment(f"{tmp_path}/{name}.py:Mine", {}).func for name in "ab"]
    assert [is_asynchronous(kind) for kind in kinds] == [True, False]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hf"])
def test_the_timing_of_tools_changes_no_token(decode, prompts_of, name):  # noqa: F811
    """Four rows are generated together, or the first one last; both leave the same random state."""

    def run(is_gated):
        opened, ended = threading.Event(), []

        class Echo:
            async def reset(self, row):
                self.turns, self.is_slow = 0, is_gated and row["prompt_text"] == "1+2="

            async def step(self, answer):
                self.turns += 1
                if self.is_slow:
                    await asyncio.to_thread(opened.wait, 10.0)
                elif self.turns == 3:
                    ended.append(answer)
                    if len(ended) == 3:
                        opened.set()
                torch.rand(1)
                return f"{len(answer) % 10}{answer[:1]}", 0.5, self.turns == 3

        torch.manual_seed(1)
        prompts = prompts_of("1+2=", "12+345=", "9=", "+")
        sampling = sampling_of(90, stop_token_ids=STOPS)
        return decode(name, prompts, sampling, Echo, independent=True), torch.rand(1)

    (together, state), (late, late_state) = run(False), run(True)
    assert together.episode_ends == late.episode_ends == ("done",) * 4
    for column in ("ids", "response_mask", "feedback_mask", "turn_rewards"):
        assert torch.equal(getattr(together, column), getattr(late, column)), column
    assert torch.allclose(together.logprobs, late.logprobs, atol=1e-5)
    assert torch.equal(state, late_state)


def test_rows_and_turns_draw_different_tokens(decode, prompts_of):  # noqa: F811
    torch.manual_seed(1)
    rollout = decode(
        "static", prompts_of(*["1+2="] * 8), sampling_of(30, stop_token_ids=STOPS), independent=True
    )
    assert len({tuple(row) for row in rollout.response_ids.tolist()}) == 8


def test_calls_in_flight_are_bounded(generator_of, prompts_of):
    running = most = 0

    class Counting:
        async def reset(self, row):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1

        async def step(self, answer):
            await self.reset(None)
            return None, 1.0, True

    generator_of(Counting, {}, independent=True, workers=3)(prompts_of(*"12345678"), sampling_of(9))
    assert most == 3 and running == 0


class Failing:
    """Fails in the ways of async code."""

    async def reset(self, row):
        pass

    async def step(self, answer):
        if answer == "b":
            raise SystemExit(3)
        if answer == "c":
            raise asyncio.CancelledError
        if answer == "!":
            await asyncio.Event().wait()
        return (None, 1 / 0 if answer == "a" else 1.0, True)


def test_an_async_error_ends_its_response_only(generator_of, prompts_of, caplog):
    script = {"1=": "a", "2=": "b", "3=": "c", "4=": "!", "5=": "5"}
    generate = generator_of(Failing, script, independent=True, timeout_seconds=0.7, workers=5)
    for _ in range(2):  # the event loop survives
        rollout = generate(prompts_of("1=", "2=", "3=", "4=", "5="), sampling_of(20))
        assert rollout.episode_ends == ("error", "error", "error", "timeout", "done")
    assert "the environment raised ZeroDivisionError: division by zero at " in caplog.records[0].getMessage()


def test_a_stop_request_cancels_the_calls(generator_of, prompts_of):
    class Stopped(Exception):
        pass

    class Waiting:
        async def reset(self, row):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async def step(self, answer): ...

    def check():
        if started.is_set():
            raise Stopped

    started, cancelled = threading.Event(), threading.Event()
    with pytest.raises(Stopped):
        generator_of(Waiting, {}, independent=True, check=check)(prompts_of("1="), sampling_of(9))
    assert cancelled.wait(20.0)


def test_ranks_generate_equally_often_while_one_waits(tokenizer, prompts_of, generator_of):
    """Rank 0 has the slow row alone; rank 1 goes on meanwhile, and rank 0 decodes fillers."""
    whole, gate = prompts_of("1=", "2=", "3=", "2="), Gate(3)
    barrier, shares, calls = threading.Barrier(2), [None, None], {}

    def work(rank):
        backend = Scripted(tokenizer, SCRIPT)
        generate = generator_of(
            waiting(gate, True), backend, independent=True, world=ThreadWorld(rank, 2, barrier, shares)
        )
        rollout = generate(whole.select(torch.tensor([[0], [1, 2, 3]][rank])), sampling_of(20))
        calls[rank] = backend.calls
        return rollout

    found = concatenate(run_threads(2, work, barrier))
    assert found.episode_ends == ("done",) * 4 and found.response_lengths.tolist() == [8] * 4
    assert len(calls[0]) == len(calls[1]) == 5
    assert calls[0] == [["1="], ["1="], ["1="], ["1=a<eos>0"], ["1=a<eos>0b<eos>0"]]
    assert [len(rows) for rows in calls[1]] == [3, 3, 3, 1, 1]
