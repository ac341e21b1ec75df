"""Tests which models of a config are downloaded before they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_ds.assemble.downloads import models_to_download
from ppo_ds.models import download
from ppo_ds.models.download import HubFiles, HubModel, download_files
from tests.config.commands import MINIMAL, compose
from tests.ppo.conftest import run_ranks


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {"actor": "org/actor", "reference": "org/actor"}),
        (("algo=grpo", "rollout.samples_per_prompt=2", "algo.kl.place=none"), {"actor": "org/actor"}),
        (
            ("critic.init=path", "critic.model.path=org/critic", "reference.model.path=org/base"),
            {"actor": "org/actor", "critic": "org/critic", "reference": "org/base"},
        ),
        (
            ("reward=model", "reward.model.path=org/rm", "~reward.path"),
            {"actor": "org/actor", "reference": "org/actor", "reward": "org/rm"},
        ),
        (
            ("reward=teacher", "algo=distill", "reward.model.path=org/teacher", "~reward.path"),
            {"actor": "org/actor", "reward": "org/teacher"},
        ),
        (
            ("reward=minimind", "~reward.path"),
            {
                "actor": "org/actor",
                "reference": "org/actor",
                "reward.parts.model.reward": "internlm/internlm2-1_8b-reward",
            },
        ),
    ],
)
def test_models_of_a_config(arguments: tuple[str, ...], expected: dict[str, str]) -> None:
    minimal = MINIMAL
    if "~reward.path" in arguments:
        minimal = tuple(each for each in MINIMAL if not each.startswith("reward"))
    config = compose(*minimal, *(each for each in arguments if each != "~reward.path"))
    models = models_to_download(config)
    assert {model.key: model.path for model in models} == {
        f"{key}.model.path": path for key, path in expected.items()
    }
    assert [model.trust_remote_code for model in models] == ["internlm" in m.path for m in models]


def test_a_model_that_one_role_trusts_is_downloaded_with_its_code_once(monkeypatch, tmp_path: Path) -> None:
    asked, made = [], []
    monkeypatch.setattr(download, "_downloaded", {})
    monkeypatch.setattr(download, "download", lambda files, names: made.append(files.model))

    def list_files(model: HubModel) -> HubFiles | None:
        asked.append(model)
        return HubFiles(model, "c0ffee") if model.path == "org/a" else None

    monkeypatch.setattr(download, "list_files", list_files)
    plain, trusted = HubModel("actor", "org/a", None), HubModel("reward", "org/a", None, True)
    other, local = HubModel("critic", "org/a", "v1"), HubModel("reference", str(tmp_path), None)
    unlisted = HubModel("scorer", "org/mirrored", None)
    run_ranks(2, lambda world: download_files([plain, trusted, plain, other, local, unlisted], world))
    assert asked == [trusted, other, unlisted] and made == [trusted, other] * 2
    assert download.hub_arguments("org/a", None) == {"revision": "c0ffee", "local_files_only": True}
    assert download.hub_arguments("org/mirrored", None) == {}
    assert download.hub_arguments(str(tmp_path), None) == {}
