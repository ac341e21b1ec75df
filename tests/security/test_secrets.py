"""Tests that keys do not reach the files of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ppo_ds.secrets import censored, secrets_in
from ppo_ds.tracking.jsonl import JsonlTracker
from ppo_ds.tracking.tracker import Trackers

ROOT = Path(__file__).parents[2]
KEY = "not-a-real-key-0123456789"


PEM = "-----BEGIN RSA PRIVATE KEY-----\nKind: a,b-c\n\nb3BlbnNz\naC1rZXkt\n-----END RSA PRIVATE KEY-----\n"


@pytest.mark.parametrize("key", ["abc\\def\"ghi'jkl", "größe-abcdefgh", "abcdefgh\n", "abcd\nefgh", PEM])
@pytest.mark.parametrize("spell", [str, str.strip, repr, json.dumps, lambda key: str(KeyError(key))])
def test_a_key_is_censored_as_python_and_json_quote_it(monkeypatch, key, spell):
    monkeypatch.setenv("MY_SERVICE_KEY", key)
    text = censored(f"before {spell(key)} after")
    assert text.replace("'", "").replace('"', "").replace("\\n", "").split() == ["before", "***", "after"]


@pytest.mark.parametrize("spell", [str, repr])
def test_the_whole_of_a_private_key_is_censored(spell):
    text = censored(f"before {spell(PEM)} after")
    assert "b3BlbnNz" not in text and "aC1rZXkt" not in text and text.startswith("before ")


class Recorder:
    """Stands in for a tracker: records what is logged."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *given, **named: self.told.append((name, given, named))


def test_an_error_that_quotes_a_key_is_censored_in_every_record(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_KEY", KEY)
    recorder = Recorder()
    trackers = Trackers([JsonlTracker(tmp_path), recorder])
    row = {"prompt": f"p {KEY}", "response": "r", "score": 1.0, "kl": 0.0, "length": 1, "finish": "eos"}
    trackers.samples(1, [row])
    trackers.event(1, "warning", f"refused with {KEY}")
    trackers.finish({"exit_reason": "error", "error": f"ValueError: 401 for {KEY}", "more": [{"x": KEY}]})
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {"summary.json", "step_000001.jsonl", "events.jsonl"}
    assert not [file.name for file in files if KEY in file.read_text()] and KEY not in str(recorder.told)
    assert json.loads((tmp_path / "summary.json").read_text())["error"] == "ValueError: 401 for ***"


SECRETS = {
    "x-api-key": "abc",
    "X-Api-Key": "abc",
    "apiKey": "abc",
    "token": "abc",
    "auth_token": "abc",
    "hf-token": "abc",
    "passphrase": "abc",
    "private_key": "abc",
    "Authorization": "abc",
    "client_secret": "abc",
    "Cookie": "abc",
    "github": "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuv",
    "google": "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "groq": "gsk_abcdefghij0123456789ABCDEFGHIJ",
    "nvidia": "nvapi-abcdefghij0123456789ABCDEFGHIJ",
    "gitlab": "glpat-abcdefghij0123456789",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.c2lnbmF0dXJl",
    "slack": "xoxb-123456789012-abcdefghijkl",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "hub": "hf_abcdefghijklmnopqrstuvwxyz",
    "openai": "sk-proj-abcdefghij0123456789",
    "replicate": "r8_abcdefghij0123456789abcdef",
    "stripe": "sk_live_abcdefghij0123456789",
    "pwd": "abc",
    "auth": "abc",
    "openai_key": "abc",
    "url": "https://me:pass/word@host/v1",
    "password": 12345678,
    "pem": "-----BEGIN RSA PRIVATE KEY-----",
    "pass_phrase": "abc",
    "basic": "Authorization: Basic YWJjOmFiYzphYmM=",
    "encryption-key": "abc",
    "cerebras": "csk-abcdefghij0123456789",
    "fireworks": "fw_abcdefghij0123456789",
    "langsmith": "lsv2_pt_abcdefghij0123456789_01",
    "together": "tgp_v1_abcdefghij0123456789",
    "databricks": "dapi" + "0123456789abcdef" * 2,
    "sendgrid": "SG.abcdefghij0123456789.abcdefghij0123456789",
    "vault": "hvs.abcdefghij0123456789abcdef",
    "docker": "dckr_pat_abcdefghij0123456789",
    "note": "WANDB_API_KEY=" + "0123456789abcdef" * 2,
    "azure": "DefaultEndpointsProtocol=https;AccountKey=abcdefghij0123456789==",
    "hook": "https://hooks.slack.com/services/T00000000/B00000000/abcdefghij",
}


@pytest.mark.parametrize("name", SECRETS)
def test_common_keys_in_a_config_are_found(name):
    (line,) = secrets_in({"reward": {"options": {name: SECRETS[name]}}})
    assert line.startswith(f"reward.options.{name}: holds what looks like a password") and "abc" not in line


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"Authorization": {"value": "abc"}}},
        {"tokens": [["abc"]]},
        {"headers": {"sk-proj-abcdefghij0123456789": "x"}},
    ],
)
def test_keys_in_nested_values_and_in_names_are_found(options):
    (line,) = secrets_in({"reward": {"options": options}})
    assert line.startswith("reward.options.") and "abc" not in line


INNOCENT = {
    "stop_token_ids": [1, 2],
    "eos_token": "<|im_end|>",
    "pad_token": "<pad>",
    "stop_token": "</s>",
    "max_tokens": 512,
    "token_budget": "auto",
    "tokenizer": "meta-llama/Llama-3-8B",
    "tokenizer_path": "/data/tokenizers/sk-learn-classification-tokens",
    "key_env": "JUDGE_KEY",
    "column": "answer_key",
    "key": "answer",
    "monkey": "abc",
    "secretary": "abc",
    "path": "/data/hf_cache_of_the_whole_group/x",
    "name": "task-force-of-the-year-2024-sk",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "url": "https://host/a?page=2&keys=1&monkey=banana",
    "pattern": r"(?i)score[ \t]*[:=]\s*(\d+)",
    "template": "You are a bearer of good news. Rate {prompt} and {response}; the token counts.",
    "password": "",
    "tokens": 4096,
    "page": "https://host:8000/@me",
    "blog": "https://host/@me",
    "label_key": "label",
    "author": "someone",
    "pass": "first",
    "spat": "hf_small",
    "dtype": "bf16",
    "folder": "/data/fw_models_of_the_whole_group/hvs.module",
    "lesson": "Basic understanding of SG.countries",
}


@pytest.mark.parametrize("name", INNOCENT)
def test_ordinary_values_are_not_taken_for_keys(name):
    assert list(secrets_in({"reward": {"options": {name: INNOCENT[name]}}})) == []


def test_censoring_a_long_text_takes_linear_time():
    """The text of an error is untrusted; with quadratic time, censoring would take minutes."""
    for text in (
        "?passw" * 200_000,
        "?" + "passw" * 200_000,
        "://" + "a" * 10**6,
        "Bearer" + " " * 10**6,
        "eyJ" * 10**5,
    ):
        assert censored(text) == text


def test_files_with_keys_are_neither_committed_nor_copied_into_an_image():
    for name in (".gitignore", ".dockerignore"):
        lines = (ROOT / name).read_text().splitlines()
        assert {".env", ".env.*", ".deepspeed_env", ".netrc", "*.pem", "*.key"} <= {
            line.removeprefix("**/") for line in lines
        }, name


def test_no_page_advises_to_put_a_key_into_deepspeed_env():
    """The launcher logs the content of that file, and pdsh exposes it in the list of processes."""
    pages = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "dev" / "security.md"}
    before = [
        text[: match.start()][-40:]
        for text in (" ".join(page.read_text().split()) for page in pages)
        for match in re.finditer(r"`\.deepspeed_env", text)
    ]
    forbidding = re.compile(r"(no keys? into|(never|not) in) $")
    assert before and [text for text in before if not forbidding.search(text)] == []
