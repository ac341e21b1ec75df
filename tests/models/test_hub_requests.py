"""Tests how many ranks send requests to the Hub, which a server on this machine replaces."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_ds.models import tiny
from tests.security.test_code_of_models import references
from tests.support.hub_server import HubServer
from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow
CODE = """\
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    pass

class Model(LlamaForCausalLM):
    config_class = Config
"""
WORKER = "tests.models.hub_worker"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """Serves org/plain, which has no code, and org/code, which has its own."""
    folder = tmp_path_factory.mktemp("hub")
    tokenizer = tiny.character_tokenizer("ab")
    model = tiny.tiny_llama(tokenizer, hidden_size=8, layers=1, heads=2, max_tokens=8)
    for name in ("plain", "code"):
        tiny.save(model, tokenizer, folder / name)
    (folder / "code" / "mine.py").write_text(CODE)
    config = folder / "code" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": references("")}))
    (folder / "plain" / "model.gguf").write_bytes(b"other format")
    with HubServer({"org/plain": folder / "plain", "org/code": folder / "code"}) as server:
        yield server


@pytest.fixture(scope="module")
def ranks(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    folder = tmp_path_factory.mktemp("ranks")
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    with RankServer(folder, HF_HOME=str(folder / "home"), **online) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(hub: HubServer) -> None:
    hub.requests.clear()
    hub.fails = None
    hub.lists_files = True


def test_only_one_rank_of_a_node_asks_the_hub(hub: HubServer, ranks: RankServer, tmp_path: Path) -> None:
    ranks.check(f"{WORKER}:load_everything", 4, str(tmp_path))
    assert set(hub.requests) == {"rank0"}, hub.requests
    assert not any("gguf" in request for request in hub.requests["rank0"])
    # a second start asks for nothing but the commit and its files
    hub.requests.clear()
    ranks.check(f"{WORKER}:load_everything", 4, str(tmp_path))
    assert set(hub.requests) == {"rank0"} and len(hub.requests["rank0"]) == 4, hub.requests
    # with a Hub that answers too many requests, the cache suffices
    hub.requests.clear()
    hub.fails = 403
    ranks.check(f"{WORKER}:load_everything", 4, str(tmp_path))
    assert set(hub.requests) == {"rank0"}, hub.requests


def test_without_the_download_every_rank_asks(hub: HubServer, ranks: RankServer, tmp_path: Path) -> None:
    """Shows that the other tests would notice requests."""
    ranks.check(f"{WORKER}:load_without_download", 2, str(tmp_path))
    assert min(len(hub.requests[f"rank{rank}"]) for rank in range(2)) > 3


def test_nodes_with_caches_of_their_own(hub: HubServer, ranks: RankServer, tmp_path: Path) -> None:
    ranks.check(f"{WORKER}:load_everything", 4, str(tmp_path / "0"), str(tmp_path / "1"), nodes=2)
    assert set(hub.requests) == {"rank0", "rank2"}, hub.requests


def test_nodes_that_share_a_cache(hub: HubServer, ranks: RankServer, tmp_path: Path) -> None:
    ranks.check(f"{WORKER}:load_everything", 4, str(tmp_path), nodes=2)
    assert set(hub.requests) == {"rank0"}, hub.requests


def test_a_mirror_that_does_not_list_files(hub: HubServer, ranks: RankServer, tmp_path: Path) -> None:
    hub.lists_files = False
    ranks.check(f"{WORKER}:load_everything", 2, str(tmp_path))
    hub.requests.clear()
    hub.fails = 403
    ranks.check(f"{WORKER}:load_everything", 2, str(tmp_path))
    assert set(hub.requests) == {"rank0"}, hub.requests


def test_all_nodes_load_the_commit_that_the_first_one_has_found(
    hub: HubServer, ranks: RankServer, tmp_path: Path
) -> None:
    """The model changes on the Hub between the downloads of the first and of the second node."""
    changed = tmp_path / "changed"
    shutil.copytree(next(iter(hub._commits["org/plain"].values())), changed)
    (changed / "config.json").write_text("{}")
    content = hub.content

    def change_after_download(name: str, commit: str, file: str) -> bytes | None:
        if file == "model.safetensors" and len(hub._commits["org/plain"]) == 1:
            hub.update("org/plain", changed)
        return content(name, commit, file)

    hub.content = change_after_download
    try:
        ranks.check(f"{WORKER}:load_everything", 4, str(tmp_path / "0"), str(tmp_path / "1"), nodes=2)
    finally:
        hub.content = content
    assert len(hub._commits["org/plain"]) == 2


def test_an_error_is_that_of_the_rank_that_downloads(
    hub: HubServer, ranks: RankServer, tmp_path: Path
) -> None:
    ranks.check(f"{WORKER}:end_with_one_error", 4, str(tmp_path), nodes=2)
    assert set(hub.requests) == {"rank0"}, hub.requests
    errors = {path.read_text() for path in tmp_path.glob("error*")}
    assert len(errors) == 1 and len(list(tmp_path.glob("error*"))) == 4
    assert "Repository Not Found" in errors.pop()
