"""Tests rewards over HTTP against a real local server; pauses between retries are 0."""

import asyncio
import gzip
import json
import logging
import os
import stat
import subprocess
import sys
import traceback
from concurrent.futures import wait
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace

import psutil
import pytest
import torch

from ppo_ds.config.targets import bind
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.rewards import http_client
from ppo_ds.rewards.base import Responses, RewardError
from ppo_ds.rewards.remote import RemoteReward
from tests.rewards.reward_cases import make_rollout
from tests.rewards.service import lengths, says, serving

ROOT = Path(__file__).parents[2]
SECRET = "sk-very/secret+123"
QUICK = dict(timeout_seconds=20, backoff_seconds=0)
JUDGE_SETTINGS = dict(protocol="openai", model="judge-1")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("JUDGE_KEY", SECRET)


def bound(tokenizer, url, **settings):
    """Builds the reward from a config section."""
    return bind({"_target_": "ppo_ds.rewards.remote.RemoteReward", "url": url, **settings}, "reward")(
        tokenizer=tokenizer
    )


@pytest.fixture
def ask(tokenizer):
    """Returns a function that scores texts with a reward with the given settings and service."""

    def asked(service, *texts, **settings):
        texts = texts or ("yes", "no")
        responses = Responses(
            tuple({"prompt_text": f"p{i}"} for i in range(len(texts))), texts, (True,) * len(texts)
        )
        return bound(tokenizer, service.url, **QUICK | settings).score_responses(responses)

    return asked


def refused(ask, service, *texts, **settings):
    """Returns the line of the RewardError; asserts that its traceback does not contain the key."""
    with pytest.raises(RewardError) as caught:
        ask(service, *texts, **settings)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_scoring_service_gets_the_documented_request(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"messages": messages, "answer": 4}, {"answer": 5}, {"answer": 6}]
    rollout = make_rollout(tokenizer, [("<user>hi", "hello"), ("b", ""), ("c", "you")], rows)
    with serving(lengths) as service:
        scores = bound(tokenizer, service.url, batch_size=2, concurrency=1)(rollout)
        assert scores.total.tolist() == [5, 0, 3] and scores.total.dtype == torch.float32
        assert (
            scores.components == {}
            and not scores.per_token.any()
            and scores.per_token.shape == rollout.response_mask.shape
        )
        assert service.bodies == [
            {
                "items": [
                    {"prompt": "<user>hi", "response": "hello", "messages": messages},
                    {"prompt": "b", "response": ""},
                ]
            },
            {"items": [{"prompt": "c", "response": "you"}]},
        ]
        service.bodies.clear()
        bound(tokenizer, service.url, send_rows=True)(rollout)
        assert [item["row"]["answer"] for item in service.bodies[0]["items"]] == [4, 5, 6]


def test_scores_keep_their_order_when_the_first_reply_comes_last(ask):
    last_is_answered = Event()

    def reply(number, body):
        if body["items"][0]["response"] == "a":
            assert last_is_answered.wait(20)
        if body["items"][-1]["response"] == "eeeee":
            last_is_answered.set()
        return lengths(number, body)

    with serving(reply) as service:
        assert ask(service, "a", "bb", "ccc", "dddd", "eeeee", batch_size=1, concurrency=5).tolist() == [
            1,
            2,
            3,
            4,
            5,
        ]


def test_concurrency_limits_the_simultaneous_requests(ask):
    open_now, most, pair = [], [], Barrier(2)

    def reply(number, body):
        open_now.append(number)
        most.append(len(open_now))
        pair.wait(300)  # waits for the second simultaneous request
        open_now.remove(number)
        return lengths(number, body)

    with serving(reply) as service:
        ask(service, *"abcdefgh", batch_size=1, concurrency=2)
    assert len(service.bodies) == 8 and max(most) == 2


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_transient_failures_are_retried(ask, status):
    with serving(
        lambda number, body: lengths(number, body) if number == 2 else (status, {}, b"busy")
    ) as service:
        assert ask(service).tolist() == [3, 2]
        assert len(service.bodies) == 3 and service.bodies[0] == service.bodies[2]
        service.bodies.clear()
        line = refused(ask, service, retries=1)
        assert (
            line
            == f"reward.url={service.url}: status {status}: busy; 2 attempt(s) (rows 0 to 1, prompt 'p0')"
        )


def test_pauses_follow_retry_after_and_double_otherwise(ask, monkeypatch):
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(http_client, "asyncio", SimpleNamespace(timeout=asyncio.timeout, sleep=pause))
    # the last two are dates that overflow in the standard library's parser of dates
    asks = ["0.25", "7", "1e9", "Wed, 21 Oct 2015 07:28:00 GMT", "soon", "nan", "-3"]
    asks += ["Wed, 21 Oct 2015 07:28:00 +99999999999999", "Wed, 21 Oct 99999999999999 07:28:00 GMT"]

    def reply(number, body):
        return (429, {"Retry-After": asks[number]}, b"") if number < len(asks) else lengths(number, body)

    with serving(reply) as service:
        assert ask(service, retries=9).tolist() == [3, 2]
        # at most a minute: during a longer pause, the other ranks would time out
        assert pauses == [0.25, 7, 60, 0, 0, 0, 0, 0, 0]
        pauses.clear()
        asks[:] = [""] * 9
        service.bodies.clear()
        ask(service, retries=9, backoff_seconds=1)
    assert all(2**i / 2 <= pause <= 2**i for i, pause in enumerate(pauses[:6])), pauses
    # random jitter, so that waiting clients do not retry at the same time
    assert pauses[7:] == [60, 60] and pauses[:6] != [1, 2, 4, 8, 16, 32]


def test_pauses_do_not_change_the_random_state(ask):
    import random

    random.seed(3)
    before = random.getstate()
    with serving(lambda number, body: lengths(number, body) if number else (500, {}, b"")) as service:
        ask(service)
    assert random.getstate() == before


def test_a_service_that_is_slow_or_unreachable(ask):
    release = Event()

    def reply(number, body):
        release.wait(20)
        return lengths(number, body)

    with serving(reply) as service:
        line = refused(ask, service, timeout_seconds=0.2, retries=1)
        release.set()
    assert "no reply within 0.2 s; 2 attempt(s)" in line
    line = refused(ask, service, retries=2)
    assert "ConnectError" in line and "3 attempt(s)" in line


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Long: ",
    ],
)
def test_a_slow_stream_is_cut_off_at_the_time_limit(ask, tokenizer, start):
    """Each chunk arrives within the time limit, but the whole reply does not."""
    import socket
    from threading import Thread

    listening = socket.create_server(("127.0.0.1", 0))
    over = Event()

    def trickle():
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(start)
            while not over.wait(0.02):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    Thread(target=trickle, daemon=True).start()
    reward = RemoteReward(
        f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout_seconds=0.3, retries=0, tokenizer=tokenizer
    )
    with pytest.raises(RewardError, match="no reply within 0.3 s"):
        reward.score_responses(Responses(({"prompt_text": "p"},), ("a",), (True,)))
    over.set()
    listening.close()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 422])
def test_other_client_errors_are_not_retried(ask, status):
    with serving(lambda number, body: (status, {}, b"no\nsuch\x1b[31m model " + SECRET.encode())) as service:
        line = refused(ask, service, key_env="JUDGE_KEY")
        assert len(service.bodies) == 1
    assert f"status {status}: no such?[31m model ***; 1 attempt(s)" in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "the reply is not JSON: {; 1 attempt(s)"),
        (b"[" * 100_000, "the reply is not JSON: [[["),
        (b"\xff\xfe", "the reply is not JSON"),
        (b"", "the reply is not JSON"),
        ([1, 2], "the reply is '[1, 2]', not {\"scores\": [...]}"),
        ({"score": [1, 2]}, "the reply is \"{'score': [1, 2]}\", not"),
        ({"scores": 3}, "not {"),
        ({"scores": [1]}, "the reply has 1 scores for 2 items"),
        ({"scores": [1, 2, 3]}, "the reply has 3 scores for 2 items"),
        (b'{"scores": [1, NaN]}', "the reply has 'nan' for item 1; a score must be a finite number"),
        (b'{"scores": [1, 1e999]}', "the reply has 'inf' for item 1"),
        (b'{"scores": [-1e39, 1]}', "the reply has '-1e+39' for item 0"),
        ({"scores": [1, None]}, "the reply has 'None' for item 1"),
        ({"scores": [True, 1]}, "the reply has 'True' for item 0"),
        ({"scores": ["1", 1]}, "the reply has '1' for item 0"),
    ],
)
def test_an_invalid_reply_is_an_error_and_never_a_zero(ask, content, said):
    with serving(lambda number, body: (200, {}, content)) as service:
        line = refused(ask, service)
        assert len(service.bodies) == 1  # no retry, since it would return the same
    assert said in line and line.endswith("; 1 attempt(s) (rows 0 to 1, prompt 'p0')")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(ask, status):
    with serving(lengths) as other:
        with serving(lambda number, body: (status, {"Location": f"{other.url}?with=query"}, b"")) as service:
            line = refused(ask, service, key_env="JUDGE_KEY")
        assert other.bodies == []  # neither texts nor key were sent to the other service
    assert f"status {status}: redirects are not followed; give the final URL" in line


def test_replies_have_a_size_limit(ask):
    with serving(lambda number, body: (200, {}, {"scores": [1, 2], "padding": "x" * 5000})) as service:
        assert ask(service).tolist() == [1, 2]
        assert "the reply exceeds 0.00390625 MB; 1 attempt(s)" in refused(ask, service, max_response_mb=2**-8)
    with serving(lambda number, body: (200, {"Content-Encoding": "gzip"}, b"a bomb, perhaps")) as service:
        assert "reply is compressed" in refused(ask, service)
    bomb = gzip.compress(b'{"scores": [1, 2], "padding": "' + bytes(2**24) + b'"}')  # 16 MB in 16 KB
    for headers in (
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "GZIP"},
        {"Content-Encoding": "identity, gzip"},
        {},
    ):
        with serving(lambda number, body, headers=headers: (200, headers, bomb)) as service:
            line = refused(ask, service)
        assert ("reply is compressed" in line) == bool(headers) and ("is not JSON" in line) == (not headers)
    assert service.headers[0]["Accept-Encoding"] == "identity"


def test_the_key_goes_into_the_header_and_nowhere_else(ask, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(lengths) as service:
        ask(service, key_env="JUDGE_KEY")
        assert service.headers[0]["Authorization"] == f"Bearer {SECRET}" and SECRET not in str(service.bodies)
        ask(service)
        assert "Authorization" not in service.headers[1]
    for reply in (
        (403, {}, SECRET.encode()),
        (500, {}, SECRET.encode() * 9),
        (200, {}, SECRET.encode()),
        (302, {"Location": f"/{SECRET}"}, b""),
    ):
        with serving(lambda number, body, reply=reply: reply) as service:
            refused(ask, service, key_env="JUDGE_KEY", retries=1)
    for quoted in (
        SECRET,
        SECRET.replace("/", "\\/"),
        "".join(f"\\u{ord(c):04x}" for c in SECRET),
    ):  # equal after JSON decoding
        # after 70 characters, truncating the line would leave only part of the key
        for begin in ("wrong key ", 70 * "x"):
            for content in (f'{{"error": "{begin}{quoted}"}}', f'{{"scores": ["{begin}{quoted}", 1]}}'):
                with serving(lambda number, body, content=content: (200, {}, content.encode())) as service:
                    line = refused(ask, service, key_env="JUDGE_KEY")
                assert SECRET[:5] not in line
    with serving(lambda number, body: says(f"Your key is {SECRET}. No score.")) as service:
        assert "Your key is ***" in refused(
            ask, service, "a", **JUDGE_SETTINGS, key_env="JUDGE_KEY", parse_retries=0
        )
    with serving(lambda number, body: says("Score: 4")) as service:
        assert ask(service, "a", **JUDGE_SETTINGS, key_env="JUDGE_KEY").tolist() == [4]
    refused(ask, service, key_env="JUDGE_KEY", retries=0)  # the client has disconnected
    assert SECRET not in caplog.text and "/score" not in caplog.text


def test_the_query_is_sent_but_not_shown(ask):
    with serving(lambda number, body: (400, {}, b"")) as service:
        service.url += "?api-version=7"
        assert "api-version" not in refused(ask, service)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            dict(url="http://me:pass@host/x"),
            (
                "reward.url: holds a password or a key; put it into an environment variable and name that in "
                "reward.key_env"
            ),
        ),
        (dict(url="https://host/x?api_key=pass"), "reward.url: holds a password or a key; put it"),
        (dict(url="https://host/x?a=1&sig=pass"), "reward.url: holds a password or a key; put it"),
        (dict(url="ftp://host/x"), "reward.url=ftp://host/x: must begin with http:// or https:// and a host"),
        (dict(url="host/x"), "reward.url=host/x: must begin with http:// or https:// and a host"),
        (dict(url="http:///x"), "reward.url=http:///x: must begin"),
        (dict(url="me:pass@host/x"), "reward.url: must begin"),
        (dict(url="http://host:pass/x"), "reward.url: is not a URL"),
        (dict(url=7), "reward.url: is not a URL"),
        (
            dict(key_env="sk-pass"),
            (
                "reward.key_env: must be the name of an environment variable, in capitals, never the secret "
                "itself"
            ),
        ),
        (dict(key_env="hf_pass"), "reward.key_env: must be the name"),
        (
            dict(key_env="NOT_THERE"),
            "reward.key_env=NOT_THERE: this environment variable is not set or empty; set it where the run",
        ),
        (
            dict(key_env="BROKEN_KEY"),
            "reward.key_env=BROKEN_KEY: the value of this variable cannot be sent as a key",
        ),
        (
            dict(model="judge"),
            (
                "reward.model=judge: a scoring service has no model; for a language model as judge set "
                "reward.protocol=openai"
            ),
        ),
        (dict(protocol="openai"), "reward.model is missing"),
        (
            JUDGE_SETTINGS | dict(template="Rate {response}"),
            "reward.template: has no {prompt}, which the judge must see",
        ),
        (JUDGE_SETTINGS | dict(template=""), "reward.template: has no {prompt} and no {response}"),
        (JUDGE_SETTINGS | dict(lowest=5), "reward.lowest=5: must be below reward.highest=5"),
        (JUDGE_SETTINGS | dict(pattern="("), "reward.pattern=(: is not a regular expression"),
        (JUDGE_SETTINGS | dict(pattern=r"\d+"), r"reward.pattern=\d+: has 0 groups; it needs exactly one"),
        (dict(batch_size=0), "reward.batch_size=0: must be at least 1"),
        (dict(api_key="pass"), "reward.api_key=...: no such key"),
        (dict(key="pass"), "reward.key=...: no such key"),
    ],
)
def test_invalid_settings_are_found_before_anything_is_sent(tokenizer, monkeypatch, settings, line):
    monkeypatch.setenv("BROKEN_KEY", "pass\nword")
    with pytest.raises(UserError) as caught:
        bound(tokenizer, **{"url": "http://host/x"} | settings)
    (problem,) = caught.value.problems
    assert problem.startswith(line) and "pass" not in problem.replace("a password", "")


def test_the_url_is_checked_before_any_object_is_made():
    """A password in the URL is refused before config.yaml is written."""
    with pytest.raises(UserError, match="^reward.url: holds a password"):
        bind({"_target_": "ppo_ds.rewards.remote.RemoteReward", "url": "http://me:you@host"}, "reward")


def test_a_row_that_is_not_json(tokenizer):
    reward = bound(tokenizer, "http://host.invalid/", send_rows=True)
    with pytest.raises(
        RewardError,
        match=(
            r"^reward.url=http://host.invalid/: the request cannot be written as JSON "
            r"\(.*set.*\) \(row 0, prompt 'p'\)"
        ),
    ):
        reward.score_responses(Responses(({"prompt_text": "p", "image": {1, 2}},), ("a",), (True,)))


def test_after_an_error_other_requests_are_not_retried(ask):
    """One request fails for good while another waits for its retry; the retry is not sent."""

    first_arrived = Event()

    def reply(number, body):
        if body["items"][0]["response"] == "a":
            first_arrived.set()
            return 500, {"Retry-After": "30"}, b""
        first_arrived.wait(30)  # otherwise the failure may come before the other request is sent
        return 400, {}, b"broken"

    with serving(reply) as service:
        line = refused(ask, service, "a", "b", batch_size=1, concurrency=2)
        assert "status 400: broken" in line and "(row 1, prompt 'p1')" in line
        assert len(service.bodies) == 2


@pytest.mark.parametrize("slow", [False, True])
def test_a_stopping_run_does_not_wait_for_scores(tokenizer, slow):
    """The request is waiting for a retry, or in the middle of an attempt."""
    came, exit_now = Event(), Event()

    def reply(number, body):
        came.set()
        if slow:
            exit_now.wait(60)
        return 500, {"Retry-After": "60"}, b""

    spec = {"_target_": "ppo_ds.rewards.remote.RemoteReward", "timeout_seconds": 100.0}
    try:
        with serving(reply) as service:
            reward = bind(spec | {"url": service.url, "batch_size": 1, "concurrency": 2}, "reward")
            pending = reward(tokenizer=tokenizer).start_responses(
                Responses(({"prompt_text": "p"},) * 3, ("a", "b", "c"), (True,) * 3)
            )
            assert came.wait(60) and not pending.wait(0.1) and pending.completed == 0
            pending.cancel()
            wait(pending.tasks, 30)  # also an attempt that waits for its reply
            assert all(task.cancelled() for task in pending.tasks) and len(service.bodies) <= 2
    finally:
        exit_now.set()


def test_each_response_is_one_request_to_the_judge(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is {response}?"}]
    rows = [{"messages": chat}, {"messages": [{"role": "user", "content": "hi"}]}, {}]
    rollout = make_rollout(tokenizer, [("<s>x", "an {prompt}"), ("<user>hi", "yo"), ("plain", "text")], rows)
    with serving(lambda number, body: says(f"Score: {number}")) as service:
        settings = JUDGE_SETTINGS | dict(template="Q {prompt} A {response}", concurrency=1, lowest=0)
        assert bound(tokenizer, service.url, **settings)(rollout).total.tolist() == [0, 1, 2]
        asked = "Q [system]\nBe brief.\n\n[user]\nWhat is {response}? A an {prompt}"
        assert service.bodies[0] == {
            "model": "judge-1",
            "messages": [{"role": "user", "content": asked}],
            "temperature": 0,
        }
        assert [body["messages"][0]["content"] for body in service.bodies[1:]] == [
            "Q hi A yo",
            "Q plain A text",
        ]
        bound(tokenizer, service.url, **settings, options={"max_tokens": 9})(rollout)
        assert service.bodies[3].keys() == {"model", "messages", "max_tokens"}


@pytest.mark.parametrize(
    ("words", "score"),
    [
        ("Score: 4", 4),
        ("It would be a score: 2, were it not for ...\nSCORE = 3.5", 3.5),
        ("**Score:** 5", 5),
        ("Score: 3/5", 3),
        ("Score: 1.\n\n", 1),
        ("The answer says\nScore: 5\nof itself, and is wrong.\n**Score: 1**", 1),
    ],
)
def test_the_judges_last_score_is_taken(ask, words, score):
    with serving(lambda number, body: says(words)) as service:
        assert ask(service, "a", **JUDGE_SETTINGS).tolist() == [score]


def test_the_pattern_can_be_set(ask):
    with serving(lambda number, body: says("[[7]] of 10")) as service:
        assert ask(service, "a", **JUDGE_SETTINGS, pattern=r"\[\[(\d+)\]\]", highest=10).tolist() == [7]


@pytest.mark.parametrize(
    ("words", "limits"),
    [("Score: 0.5", {}), ("Score: 50", {}), ("Score: -1", {}), ("Score: 3", dict(highest=2.5))],
)
def test_a_score_out_of_bounds_is_retried_and_then_an_error(ask, words, limits):
    with serving(lambda number, body: says(words)) as service:
        line = refused(ask, service, "a", **JUDGE_SETTINGS | limits, parse_retries=1)
        assert len(service.bodies) == 2
        assert (
            f"the judge gave {words[7:]}, outside of 1 to {limits.get('highest', 5)}: '{words}'; 2 attempt(s)"
            in line
        )
        assert ask(service, "a", **JUDGE_SETTINGS, lowest=None, highest=None).tolist() == [float(words[7:])]


NO_SCORE = [
    "score: 1e3",
    "good score\n\n2 reasons",
    "Score: 5\nsays the answer.",
    "It asks for Score: 5",
    "Score: 3/10",
]


@pytest.mark.parametrize(
    "words", ["I cannot say.", "Score: high", "underscore: 3", "", None, "Score: 1" + "0" * 400, *NO_SCORE]
)
def test_a_judge_without_a_score_is_retried_and_then_an_error(ask, words):
    with serving(lambda number, body: says("Score: 2" if number == 2 else words)) as service:
        assert ask(service, "a", **JUDGE_SETTINGS).tolist() == [2]
        assert len(service.bodies) == 3
        service.bodies.clear()
        line = refused(ask, service, "a", **JUDGE_SETTINGS, parse_retries=1)
        assert len(service.bodies) == 2
    assert "the judge gave no score: " in line and "2 attempt(s) (row 0, prompt 'p0')" in line


def test_a_reply_that_is_not_a_chat_completion_is_not_retried(ask):
    for content in ({"choices": []}, {"error": "x"}, [], "text", {"choices": [{"text": "Score: 1"}]}):
        with serving(lambda number, body, content=content: (200, {}, content)) as service:
            assert "not a chat completion; 1 attempt(s) (row 0" in refused(
                ask, service, "a", **JUDGE_SETTINGS
            )
            assert len(service.bodies) == 1


@pytest.mark.slow
def test_a_whole_run_writes_the_key_nowhere(tmp_path, monkeypatch):
    """The key is not in the run's files or output, nor in the list of processes."""
    values = {"JUDGE_KEY": SECRET, "HF_TOKEN": "hf_ofNobodyAtAllButLong", "WANDB_API_KEY": "0123456789" * 4}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    words = tiny.character_tokenizer("ab")
    tiny.save(
        tiny.tiny_llama(words, hidden_size=8, layers=1, heads=2, max_tokens=16), words, tmp_path / "model"
    )
    lines = []

    def reply(number, body):
        lines.extend(
            " ".join(process.cmdline())
            for process in psutil.Process(child.pid).children(recursive=True) + [psutil.Process(child.pid)]
        )
        return lengths(number, body) if number == 0 else (500, {}, SECRET.encode())

    with serving(reply) as service:
        settings = f"""
            algo=rloo reward=remote reward.url={service.url} reward.key_env=JUDGE_KEY reward.send_rows=true
            reward.retries=1 reward.backoff_seconds=0 eval.train_prompts=0 data.path={rows}
            actor.model.path={tmp_path / "model"} actor.model.dtype=fp32 sampling.max_new_tokens=2
            rollout.prompts_per_step=2 rollout.samples_per_prompt=2 run.steps=2 run.dir={tmp_path / "run"}
            run.verbose=true checkpoint.every=1 tracker.wandb.mode=offline
        """
        command = [sys.executable, "launch/train.py", *settings.split()]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        ) as child:
            try:
                said, _ = child.communicate(timeout=240)
            finally:
                child.kill()
    assert child.returncode == 1 and "status 500: ***; 2 attempt(s)" in said, said
    assert service.headers[0]["Authorization"] == f"Bearer {SECRET}" and len(service.bodies) == 3
    assert any("wandb-core" in line for line in lines), lines
    run = tmp_path / "run"
    assert (run / "checkpoints" / "step_000001" / "state.json").exists() and list(
        run.glob("wandb/offline-run-*/*.wandb")
    )
    written = (
        b"".join(file.read_bytes() for file in run.rglob("*") if file.is_file())
        + (said + "".join(lines)).encode()
    )
    for name, value in values.items():
        assert value.encode() not in written and json.dumps(value)[1:-1].encode() not in written, name
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
