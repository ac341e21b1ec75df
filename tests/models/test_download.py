"""Tests the note and the files of a download from the Hub, which is replaced."""

from __future__ import annotations

import pytest
from huggingface_hub.file_download import DryRunFileInfo
from torch import nn

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.models import download, loading

SIZES = {
    "model-00001-of-00002.safetensors": 1_500_000_000,
    "model-00002-of-00002.safetensors": 1_230_000_000,
    "pytorch_model.bin": 2_700_000_000,
    "consolidated.safetensors": 2_700_000_000,
}


class Hub:
    """Stands in for the Hub with the files of one model, of which some are in the cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.files, self.cached, self.fetched = list(SIZES), [], []
        monkeypatch.setattr(download, "snapshot_download", self.list)
        monkeypatch.setattr(download, "hf_hub_download", self.fetch)

    def list(self, path, *, revision, allow_patterns, dry_run):
        assert (path, revision, dry_run) == ("org/model", "v1", True)
        return [
            DryRunFileInfo("c0ffee", SIZES[name], name, "", name in self.cached, name not in self.cached)
            for name in self.files
        ]

    def fetch(self, path, filename, *, revision, tqdm_class):
        with tqdm_class(total=10) as bar:
            assert (path, revision) == ("org/model", "c0ffee") and bar.total == 10
        self.fetched.append(filename)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def test_the_size_is_told_before_a_download(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    download.fetch_weights("org/model", "v1", "actor.model.path")
    assert hub.fetched == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert capsys.readouterr().err.startswith("download   actor.model.path=org/model: 2.73 GB to ")


def test_only_files_that_are_not_in_the_cache_are_downloaded(hub: Hub, capsys) -> None:
    hub.cached = ["model-00001-of-00002.safetensors"]
    download.fetch_weights("org/model", "v1", "key")
    assert hub.fetched == ["model-00002-of-00002.safetensors"] and ": 1.23 GB to " in capsys.readouterr().err
    hub.cached = list(SIZES)
    download.fetch_weights("org/model", "v1", "key")
    assert len(hub.fetched) == 1 and capsys.readouterr().err == ""


def test_a_model_without_safetensors(hub: Hub) -> None:
    hub.files = ["pytorch_model.bin", "consolidated.safetensors"]
    download.fetch_weights("org/model", "v1", "key")
    assert hub.fetched == ["pytorch_model.bin"]


def test_other_ranks_local_folders_and_an_unreachable_hub(hub: Hub, monkeypatch, tmp_path, capsys) -> None:
    download.fetch_weights(str(tmp_path), None, "key")
    monkeypatch.setenv("LOCAL_RANK", "1")
    download.fetch_weights("org/model", "v1", "key")
    monkeypatch.delenv("LOCAL_RANK")

    def unreachable(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(download, "snapshot_download", unreachable)
    download.fetch_weights("org/model", "v1", "key")
    assert hub.fetched == [] and capsys.readouterr().err == ""


def test_a_log_file_gets_a_line_every_tenth_and_every_30_seconds(monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr(download.time, "monotonic", lambda: now[0])
    bar = download.DownloadBar(total=2_000_000_000, desc="model.safetensors")
    for seconds, done in ((1, 0.05), (2, 0.1), (3, 0.15), (31, 0.15), (32, 0.16), (33, 0.5), (34, 1.0)):
        now[0], bar.n = seconds, int(done * bar.total)
        bar.display()
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "download   model.safetensors: 0.20 of 2.00 GB, 10%",
        "download   model.safetensors: 0.32 of 2.00 GB, 16%",
        "download   model.safetensors: 1.00 of 2.00 GB, 50%",
        "download   model.safetensors: 2.00 of 2.00 GB, 100%",
    ]


def test_loading_a_model_downloads_it_first(monkeypatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(loading, "refuse_adapter_on_hub", lambda *_: seen.append("checked"))
    monkeypatch.setattr(loading, "fetch_weights", lambda *given: seen.append(str(given)))

    class Model:
        @staticmethod
        def from_pretrained(path, **_):
            seen.append("loaded")
            return nn.Identity(), {}

    loading.from_pretrained(Model, ModelConfig(path="org/model", revision="v1"), config=None, key="k.path")
    assert seen == ["checked", "('org/model', 'v1', 'k.path')", "loaded"]
