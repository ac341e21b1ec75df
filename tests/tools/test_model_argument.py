"""Tests how the command line names models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_ds.errors import UserError
from ppo_ds.tools.model_argument import find_models


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def adapter(folder: Path, base: str | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


def test_run_directories_model_folders_adapters_and_hub_names(tmp_path: Path) -> None:
    base, run = model(tmp_path / "start" / "model"), tmp_path / "outputs" / "run"
    model(run / "model")
    tuned = adapter(run / "model" / "adapter", str(base))
    found = find_models([str(base), str(run)])
    assert [(one.name, one.path, one.adapter) for one in found] == [
        ("start", str(base), None), ("run", str(run / "model"), None)
    ]  # fmt: skip
    [hub, lora] = find_models(["org/name", str(tuned)])
    assert (hub.name, hub.path, hub.tokenizer_path) == ("org/name", "org/name", "org/name")
    assert (lora.name, lora.path, lora.tokenizer_path, lora.adapter) == ("run", str(base), str(base), tuned)
    [lora] = find_models([str(tuned)], base="org/other")
    assert lora.path == lora.tokenizer_path == "org/other"
    (tuned / "tokenizer_config.json").write_text("{}")
    assert find_models([str(tuned)])[0].tokenizer_path == str(tuned)


def test_models_of_the_same_name_get_their_paths_as_names(tmp_path: Path) -> None:
    paths = [str(model(tmp_path / name / "run" / "model")) for name in "ab"]
    assert [one.name for one in find_models(paths)] == paths


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda folder: None,
            "x: no such folder; give a run directory, a model folder, an adapter folder or a",
        ),
        (lambda folder: folder.write_text(""), "x: is a file; give a run directory"),
        (
            lambda folder: folder.mkdir(),
            "x: contains no model (no config.json, adapter_config.json or model/",
        ),
        (lambda folder: (folder / "checkpoints").mkdir(parents=True), "contains no finished model; export a"),
        (
            lambda folder: adapter(folder, None),
            "adapter_config.json: names no base model; give the base model",
        ),
        (
            lambda folder: adapter(folder, "./gone"),
            "base_model_name_or_path=./gone: no such folder; give the base model as actor.model.path=MODEL",
        ),
    ],
    ids=["missing", "file", "empty", "unfinished", "no base", "lost base"],
)
def test_a_folder_without_a_model_is_one_line(tmp_path: Path, make, line: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(UserError) as caught:
        find_models([str(tmp_path / "x")])
    assert len(caught.value.problems) == 1 and line in caught.value.problems[0]


def test_a_misspelled_or_empty_model_is_refused_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "tiny" / "model"), model(tmp_path / "outputs" / "tuned" / "model")
    for wrong, meant in (("tiny/modle", "tiny/model"), ("outputs/tunde", "outputs/tuned")):
        with pytest.raises(UserError, match=f"^{wrong}: no such folder; did you mean {meant}?"):
            find_models(["tiny/model", wrong])
    with pytest.raises(
        UserError, match="^MODEL='': is empty or has a name of more than 255 bytes; give a run"
    ):
        find_models([""])


def test_a_model_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = str(model(tmp_path / "a"))
    with pytest.raises(UserError, match="a: is given twice"):
        find_models([path, path])
