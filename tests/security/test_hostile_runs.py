"""Tests that hostile files in a run directory end a command with one line, and are neither published nor run.

Each file would publish another file, stall the command, exhaust its memory or end it with a traceback.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from launch import export, replay, report
from launch.cli import load_config, split_models
from launch.python import Training
from ppo_ds.config.reading import read
from ppo_ds.config.resume import unusable_start
from ppo_ds.config.schema import Config, resolved
from ppo_ds.data.messages import PromptFormat, parse_prompt
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints, damage_of
from ppo_ds.engine.checkpoint.files import CheckpointError
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.models.lora import add_adapters, merge_saved_adapter
from ppo_ds.models.policy import Policy
from ppo_ds.models.tiny import tiny_llama
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.planning.budgets import read_record
from ppo_ds.ppo.failure_dump import read_dump
from ppo_ds.run.record import recorded_settings, recorded_steps, write_settings
from ppo_ds.storage.reading import MAX_YAML_BYTES, DamagedFile, is_plain, read_json, read_text, read_yaml
from ppo_ds.tools.model_argument import find_model
from ppo_ds.tracking.html.run_data import read_object
from ppo_ds.tracking.jsonl import JsonlTracker
from tests.engine.test_checkpoint import OneRank
from tests.security.test_settings import settings_of, write_dump
from tests.tools.test_export import STEP, write_run
from tests.tracking.html.runs import make_ppo_run

TOKEN = "gho_" + "a1B2" * 9
LEVELS = 12  # 4^12 leaves
BOMB = "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}' if i else 'x'] * 4)}]\n" for i in range(LEVELS))
LOOP = "run: &run {name: *run}\n"
DEEP = "[" * 100_000


@pytest.fixture(autouse=True)
def no_stall():
    """Interrupts a test that blocks, as on a pipe."""

    def stop(*_):
        raise TimeoutError("the command stalls")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def line_of(capsys) -> str:
    text = capsys.readouterr().err
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in text
    return line


def replace(path: Path, content: str | Path | None) -> None:
    """Replaces a file or a folder by a text, by a link, or by a pipe if ``content`` is None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.rename(path.with_name("before"))
    if content is None:
        os.mkfifo(path)
    elif isinstance(content, Path):
        path.symlink_to(content)
    else:
        path.write_text(content)


# -- report ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "summary.json", "metrics.jsonl", "events.jsonl", "samples", "samples/step_000005.jsonl",
     "checkpoints"],
)  # fmt: skip
def test_a_report_does_not_publish_what_a_link_leads_to(tmp_path, capsys, name):
    run, other = make_ppo_run(tmp_path / "run", summary=name != "checkpoints"), tmp_path / "other"
    make_ppo_run(other)
    (other / "step_000001").mkdir()
    (other / "step_000001" / "state.json").write_text('{"state": {"progress": {"first_eval": {"a": 1}}}}')
    replace(run / name, other if name == "checkpoints" else other / name)
    assert report.main([str(run)]) == 2
    line = line_of(capsys)
    assert f"{run / name}" in line and "a symbolic link to a file elsewhere" in line
    assert not (run / "report.html").exists()


def test_links_within_a_run_directory_are_followed(tmp_path):
    run = make_ppo_run(tmp_path / "run")
    replace(run / "summary.json", run / "before")
    (tmp_path / "link").symlink_to(run)
    assert report.main([str(tmp_path / "link")]) == 0
    assert '"endedBy":"done"' in (run / "report.html").read_text()


def test_the_data_of_a_report_are_censored(tmp_path, monkeypatch):
    run = make_ppo_run(tmp_path / "run", events=False)
    config = {"run": {"name": f"a {TOKEN}"}, "reward": {f"key {TOKEN}": ["https://me:swordfish@host", TOKEN]}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    row = {"prompt": TOKEN, "response": f"is {TOKEN}", "tokens": {"text": ["is gh", TOKEN[2:]]}}
    (run / "samples" / "step_000020.jsonl").write_text(json.dumps(row))
    (run / "summary.json").write_text(json.dumps({"exit_reason": "error", "error": f"401: {TOKEN}"}))
    (run / "events.jsonl").write_text(json.dumps({"step": 1, "time": 1, "kind": "warning", "text": TOKEN}))
    assert report.main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert TOKEN[2:] not in page and "swordfish" not in page
    assert "401: ***" in page and "key ***" in page


HOSTILE = {
    "an alias bomb": ("config.yaml", BOMB, "aliases"),
    "an alias to itself": ("config.yaml", LOOP, "aliases"),
    "deep YAML": ("config.yaml", "a: " + DEEP, "levels"),
    "other objects": ("config.yaml", "a: 2020-01-01\n", "levels"),
    "a huge number": ("config.yaml", f"a: 0x{'f' * 20_000}\n", "levels"),
    "deep JSON": ("summary.json", DEEP, "levels"),
    "JSON with many levels": ("summary.json", '{"a":' * 500 + "1" + "}" * 500, "levels"),
    "a pipe": ("metrics.jsonl", None, "is no regular file"),
    "a pipe for samples": ("samples/step_000005.jsonl", None, "is no regular file"),
    "a pipe for the config": ("config.yaml", None, "is no regular file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_ends_a_report_with_one_line(tmp_path, capsys, kind):
    name, content, problem = HOSTILE[kind]
    run = make_ppo_run(tmp_path / "run")
    replace(run / name, content)
    assert report.main([str(run)]) == 2
    line = line_of(capsys)
    assert line.startswith(f"error: {run / name}: ") and problem in line


def test_a_deep_line_is_left_out_like_one_that_was_cut_off(tmp_path):
    run = make_ppo_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "a": ' + DEEP + "\n" + '{"step": 22, "kl/ref_seq_mean": 12}\n')
    assert report.main([str(run)]) == 0
    assert '"lastStep":22' in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", {"stage": ["ppo"]}),
        ("config.yaml", {"stage": {"a": 1}, "run": [1], "algo": 3}),
        ("events.jsonl", {"step": 1, "time": 1, "kind": ["alarm"], "text": 5}),
        ("events.jsonl", {"step": 1, "time": None, "kind": {}, "text": None}),
        ("samples/step_000005.jsonl", {"columns": 3, "prompt": [1], "response": {}, "tokens": 7}),
        ("metrics.jsonl", {"step": 21, "time": "x", "episodes": [], "kl/ref_seq_mean": {}}),
        ("summary.json", {"exit_reason": [1], "steps": "x", "heldout_accuracy_before": [1]}),
    ],
)
def test_values_of_other_types_do_not_end_a_report(tmp_path, name, content):
    run = make_ppo_run(tmp_path / "run")
    (run / name).write_text(json.dumps(content) + "\n")
    assert report.main([str(run)]) == 0
    assert "</html>" in (run / "report.html").read_text()


def test_files_have_a_largest_size(tmp_path):
    (tmp_path / "config.yaml").write_text("a: " + "b" * MAX_YAML_BYTES)
    with pytest.raises(UserError, match=r"config.yaml: has more than 256 KiB"):
        read_yaml(tmp_path / "config.yaml")
    with (tmp_path / "summary.json").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(UserError, match=r"summary.json: has more than 65,536 KiB"):
        read_json(tmp_path / "summary.json")
    assert read_text(tmp_path / "summary.json", limit=2**27) == "\0" * (2**26 + 1)


@pytest.mark.parametrize(
    "text", ["a: [1", "a: !!int ''", "a: !!timestamp x", "a: !!bool x", "? [a]\n: 1", "a\0"]
)
def test_a_damaged_config_is_left_out_of_a_report(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(DamagedFile, match=r"config.yaml: cannot be read: "):
        read_yaml(tmp_path / "config.yaml")
    assert read_object(tmp_path / "config.yaml", tmp_path) == {}


# -- resume ----------------------------------------------------------------------------------------


def test_a_start_reads_hostile_files_as_damaged_ones(tmp_path):
    run = make_ppo_run(tmp_path / "run")
    for content in (BOMB, LOOP, "a: " + DEEP, None):
        replace(run / "config.yaml", content)
        assert recorded_settings(run) is None
        (run / "config.yaml").unlink()
    for content in (DEEP, None):
        replace(run / "memory.json", content)
        assert read_record(run) == {}
        (run / "memory.json").unlink()
    replace(run / "metrics.jsonl", None)
    for start in (recorded_steps, lambda folder: JsonlTracker(folder, resumed_at=5)):
        with pytest.raises(UserError, match=r"metrics.jsonl: is no regular file"):
            start(run)


# -- export and replay -----------------------------------------------------------------------------


def renew_manifest(checkpoint: Path) -> None:
    """Writes a manifest that matches the files, as anyone can who gives a checkpoint away."""
    (checkpoint / "manifest.json").unlink()
    files = {
        str(file.relative_to(checkpoint)): file.read_bytes()
        for file in checkpoint.rglob("*")
        if file.is_file()
    }
    entries = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, "files": entries}))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("state", [1]),
        ("state.progress", {"progress": 3}),
        ("state.progress.first_eval", {"progress": {"first_eval": {"eval/score_mean": "high"}}}),
        ("state.export", {"export": {"model": [1]}}),
        ("step", -5),
        ("step", 10**30),
        ("step", True),
        ("step", "2"),
        ("world_size", 0),
        ("models", "actor"),
        ("models.0", [7]),
        ("shadows", None),
        ("settings", [1]),
        ("format", 2),
    ],
)
def test_a_state_with_other_types_or_ranges_is_one_line(tmp_path, capsys, key, value):
    run = write_run(tmp_path / "run")
    checkpoint = run / STEP
    change(checkpoint / "state.json", **{key.partition(".")[0]: value})
    renew_manifest(checkpoint)
    assert damage_of(checkpoint) == []
    assert export.main([str(run)]) == 2
    assert f"{checkpoint / 'state.json'}: {key}" in line_of(capsys)


@pytest.mark.parametrize("content", ["[]", "3", DEEP, '{"step": 1', "\xff"])
def test_a_state_that_is_no_object_is_one_line(tmp_path, capsys, content):
    run = write_run(tmp_path / "run")
    (run / STEP / "state.json").write_text(content, encoding="latin-1")
    renew_manifest(run / STEP)
    assert export.main([str(run)]) == 2
    assert f"{run / STEP / 'state.json'}: " in line_of(capsys)


def test_a_checkpoint_without_a_state_is_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / STEP / "state.json").unlink()
    renew_manifest(run / STEP)
    assert export.main([str(run)]) == 2
    assert "state.json" in line_of(capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [("shards", ["a"]), ("shards", None), ("dtype", "load"), ("dtype", 7), ("format", "1"), ("format", None)],
)
def test_an_index_with_other_types_is_one_line(tmp_path, capsys, key, value):
    run = write_run(tmp_path / "run")
    change(run / STEP / "actor" / "model.json", **{key: value})
    renew_manifest(run / STEP)
    assert export.main([str(run)]) == 2
    line = line_of(capsys)
    assert f"{run / STEP / 'actor'}" in line and key in line


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "actor/buffers.safetensors", "more"])
def test_a_pipe_in_a_checkpoint_is_damage(tmp_path, capsys, name):
    run = write_run(tmp_path / "run")
    (run / STEP / name).unlink(missing_ok=True)
    os.mkfifo(run / STEP / name)
    assert export.main([str(run)]) == 2
    assert f"{name} is neither a file nor a directory" in line_of(capsys)
    assert damage_of(run / STEP) == [f"{name} is neither a file nor a directory; remove it"]


def test_a_pipe_as_pointer_to_the_best_checkpoint_is_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "checkpoints" / "best").symlink_to("/dev/tty")
    assert export.main([str(run), "--best"]) == 2
    assert "--best" in line_of(capsys)


@pytest.mark.parametrize(
    "kind", ["an alias bomb", "an alias to itself", "deep YAML", "a pipe for the config"]
)
def test_a_hostile_config_of_a_dump_is_one_line(tmp_path, capsys, kind):
    dump = write_dump(tmp_path / "run", settings_of(tmp_path / "run"))
    _, content, problem = HOSTILE[kind]
    replace(dump / "config.yaml", content)
    assert replay.main([str(dump)]) == 2
    assert "config.yaml" in line_of(capsys)


def test_shared_parts_of_settings_take_linear_time():
    """Without a bound the tree has 2^60 leaves."""
    tree: Any = "leaf"
    for _ in range(60):
        tree = {"a": tree, "b": [tree]} if isinstance(tree, str) else {"a": tree, "b": tree}
    assert is_plain(tree)
    for bad in ({"a": tree, "b": {1: 2}}, [object()], [1 << 20_000], (1,)):
        assert not is_plain(bad)
    loop: dict[str, Any] = {}
    loop |= {"a": loop, "b": loop}
    assert not is_plain(loop)


def test_settings_that_a_run_writes_have_no_aliases(tmp_path):
    """A config can hold the same list twice, which YAML would write as an alias."""
    lora = {"rank": 2, "targets": ["q_proj"]}
    model = {"model": {"path": "a/b"}, "lora": lora}
    reward = {"_target_": "ppo_ds.rewards.rules.LengthReward", "x": lora, "y": [lora]}
    settings = resolved(
        read(Config, settings_of(tmp_path, actor=model, critic={"lora": lora}, reward=reward))[0]
    )
    write_settings(tmp_path, settings)
    assert recorded_settings(tmp_path) == settings and settings["reward"]["y"] == [lora]


def test_every_bit_of_a_manifest_counts(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    save_file({}, tmp_path / "b.safetensors")
    (tmp_path / "manifest.json").touch()
    renew_manifest(tmp_path)
    file = tmp_path / "manifest.json"
    data = file.read_bytes()
    assert damage_of(tmp_path) == []
    unnoticed = []
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        if not damage_of(tmp_path):
            unnoticed.append(bytes(flipped))
    assert unnoticed == []


# -- evaluate and chat -----------------------------------------------------------------------------


@pytest.mark.parametrize("content", [DEEP, "[]", "elsewhere"])
def test_a_hostile_adapter_config_is_one_line(tmp_path, content):
    (tmp_path / "elsewhere").write_text('{"base_model_name_or_path": "a/b"}')
    file = tmp_path / "adapter" / "adapter_config.json"
    replace(file, tmp_path / "elsewhere" if content == "elsewhere" else content)
    with pytest.raises(UserError, match=r"adapter_config.json: ") as caught:
        find_model(str(tmp_path / "adapter"))
    assert len(caught.value.problems) == 1


# -- adapters ---------------------------------------------------------------------------------------


def adapter_of(folder: Path, **values: Any) -> tuple[Any, Path]:
    """Writes a model with an adapter; returns the base model, and the adapter with other values."""
    lm = tiny_llama(tiny.character_tokenizer("ab"), hidden_size=8, layers=1, heads=1, max_tokens=16)
    add_adapters(lm, rank=1, alpha=2.0, targets=None, seed=0, key="actor.lora")
    for name, weight in lm.named_parameters():
        if "lora_B" in name:  # zero without a training
            weight.data.fill_(0.5)
    Policy(lm, 1.0).save_adapter(folder, lm.state_dict())
    change(folder / "adapter_config.json", **values)
    base = tiny_llama(tiny.character_tokenizer("ab"), hidden_size=8, layers=1, heads=1, max_tokens=16)
    return base, folder


def test_an_adapter_is_merged(tmp_path):
    base, folder = adapter_of(tmp_path / "adapter")
    before = base.model.layers[0].self_attn.q_proj.weight.clone()
    merge_saved_adapter(base, folder, "MODEL")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    saved = load_file(folder / "adapter_model.safetensors")
    added = 2.0 * saved[f"{name}.lora_B.weight"] @ saved[f"{name}.lora_A.weight"]
    assert added.any()
    torch.testing.assert_close(base.model.layers[0].self_attn.q_proj.weight, before + added)


@pytest.mark.parametrize(
    "values",
    [{"r": "x"}, {"lora_alpha": [1]}, {"target_modules": 5}, {"rank_pattern": {"(": 1}},
     {"init_lora_weights": "loftq"}, {"megatron_config": {"a": 1}}, {"peft_type": [1]}],
    ids=str,
)  # fmt: skip
def test_an_adapter_with_values_of_other_types_is_one_line(tmp_path, values):
    base, folder = adapter_of(tmp_path / "adapter", **values)
    with pytest.raises(UserError, match=f"^MODEL={folder}: its adapter "):
        merge_saved_adapter(base, folder, "MODEL")


@pytest.mark.parametrize("content", ["elsewhere", None], ids=["link", "pipe"])
def test_links_and_pipes_of_an_adapter_are_refused(tmp_path, content):
    base, folder = adapter_of(tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    replace(weights, content and tmp_path / "elsewhere")
    with pytest.raises(UserError, match="adapter_model.safetensors is (a symbolic link|neither a file)"):
        merge_saved_adapter(base, folder, "MODEL")


# -- metrics, weights and folders -------------------------------------------------------------------


BAD_RECORDS = [
    {"step": 4, "time": "x"}, {"step": 4, "time": [1]}, {"step": 4, "reward/score_mean": "x"},
    {"step": 4, "time": 10**400}, {"step": -3, "a": 1e308}, {"step": True}, {"step": 2**60},
    {"step": 4, "kl": float("nan")}, {"step": 4, "time": float("inf")},
]  # fmt: skip


@pytest.mark.parametrize("record", BAD_RECORDS, ids=str)
def test_values_in_metrics_that_no_run_has_written_are_left_out(tmp_path, capsys, record):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    (run / "events.jsonl").write_text(json.dumps(record | {"kind": "started", "text": "x"}) + "\n")
    assert export.main([str(run)]) == 0
    resumed = JsonlTracker(run, resumed_at=5)
    resumed.log(6, {"reward/score_mean": 1.0})
    resumed.finish({})


def test_metrics_of_any_size_are_not_read_at_a_start(tmp_path, monkeypatch):
    monkeypatch.setattr("ppo_ds.run.record.MAX_LINES_BYTES", 100)
    (tmp_path / "metrics.jsonl").write_text(50 * "\n")
    assert recorded_steps(tmp_path) == 50
    os.truncate(tmp_path / "metrics.jsonl", 200 * 1024**3)  # takes no space
    with pytest.raises(UserError, match=r"metrics.jsonl: has more than 0 KiB; remove it"):
        recorded_steps(tmp_path)


def damage(checkpoint: Path, kind: str) -> None:
    buffers, shard = (
        checkpoint / "actor" / "buffers.safetensors",
        next((checkpoint / "actor").glob("*0*.safetensors")),
    )
    if kind == "garbage":
        shard.write_bytes(b"garbage")
    elif kind == "garbage buffers":
        buffers.write_bytes(b"garbage")
    elif kind == "unknown buffer":
        save_file({"unknown": torch.ones(1)}, buffers)
    else:
        content = shard.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        for entry in header.values():
            if kind in ("offsets", "huge offsets") and "data_offsets" in entry:
                entry["data_offsets"] = [0.5, 1.5] if kind == "offsets" else [0, 10**30]
            elif kind == "shape" and "shape" in entry:
                entry["shape"] = [1e300]
        text = json.dumps(header).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


@pytest.mark.parametrize(
    "kind", ["garbage", "garbage buffers", "unknown buffer", "offsets", "huge offsets", "shape"]
)
def test_an_export_of_damaged_weights_with_valid_hashes_is_one_line(tmp_path, capsys, kind):
    run = write_run(tmp_path / "run")
    damage(run / STEP, kind)
    renew_manifest(run / STEP)
    assert export.main([str(run)]) == 2
    assert f"{run / STEP}: " in line_of(capsys)


@pytest.mark.parametrize("name", ["checkpoints", STEP])
def test_an_export_does_not_follow_links_to_other_folders(tmp_path, capsys, name):
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    (run / name).rename(tmp_path / "before")
    (run / name).symlink_to(other / name)
    assert export.main([str(run)]) == 2
    assert "is a link to a folder elsewhere" in line_of(capsys)
    assert export.main([str(other / STEP)]) == 0


def test_the_model_of_a_run_directory_is_no_link_to_a_folder_elsewhere(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="run/model: is a link to a folder elsewhere; give that folder"):
        find_model(str(tmp_path / "run"))
    assert find_model(str(tmp_path / "other")).path == str(tmp_path / "other")


def test_a_folder_whose_number_is_no_number_is_no_checkpoint(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "checkpoints" / "step_\u00b2").mkdir()
    assert export.main([str(run)]) == 0


@pytest.mark.parametrize("content", [DEEP, "[]", "3"], ids=["deep", "list", "number"])
def test_a_hostile_generation_config_is_one_line(tmp_path, content):
    tiny.character_tokenizer("ab").save(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config.json cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_table_of_python_does_not_follow_a_link(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"step": 1, "secret": 2}\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "other.jsonl")
    with pytest.raises(UserError, match="symbolic link to a file elsewhere"):
        print(Training(tmp_path / "run", {}).metrics)


assert sys.getrecursionlimit() < len(DEEP)


@pytest.mark.parametrize("value", ['"high"', "[1]", '{"a": 1}', "true", "9" * 400])
def test_metrics_of_other_types_do_not_end_an_export(tmp_path, value):
    run = write_run(tmp_path / "run")
    line = f'{{"step": 2, "reward/score_mean": {value}, "kl/ref_seq_mean": 0.5}}\n'
    (run / "metrics.jsonl").write_text(line)
    assert export.main([str(run)]) == 0
    card = (run / "exports" / "step_000002" / "model" / "README.md").read_text()
    assert "| 0.5 |" in card and "mean score" not in card


def test_a_folder_whose_number_no_run_writes_is_no_checkpoint(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "checkpoints" / "step_\u00b2").mkdir()
    assert export.main([str(run)]) == 0
    checkpoints = Checkpoints(run / "checkpoints", world=OneRank(), keep_last=1)
    assert checkpoints.latest() == run / STEP
    config = SimpleNamespace(run=SimpleNamespace(resume=str(run)))
    assert "step_000002; use" in next(unusable_start(config))


def experience(rows: int) -> dict[str, torch.Tensor]:
    ids, mask = torch.zeros(rows, 3, dtype=torch.long), torch.ones(rows, 1, dtype=torch.bool)
    columns = {"ids": ids, "attention_mask": ids == 0, "response_mask": mask, "finished": mask[:, 0].clone()}
    columns |= {name: torch.zeros(rows, 1) for name in ("decode_logprobs", "weights", "advantages")}
    return columns | {"scores": torch.zeros(rows), "rewards": torch.zeros(rows, 2)}


ROW = {"row_of_the_rollout": 3, "prompt": "a"}
ABOUT = {"format": 1, "step": 1, "what": "x", "rank": 0, "place": 0, "kl_coef": 0.0, "critic_only": False}


@pytest.mark.parametrize(
    "values",
    [
        *({"rows": rows} for rows in (5, None, [], ["a"], [{}], [ROW, ROW], [ROW | {"prompt": None}])),
        *({"rows": [ROW | {"row_of_the_rollout": number}]} for number in ("x", None, 1.5, [1])),
        *({"place": place} for place in ("x", -1, 1, [0])),
    ],
)
def test_a_dump_with_rows_of_other_types_is_one_line(tmp_path, values):
    save_file(experience(1), tmp_path / "update.safetensors")
    (tmp_path / "update.json").write_text(json.dumps(ABOUT | {"rows": [ROW]}))
    assert read_dump(tmp_path).row(0) == 3
    change(tmp_path / "update.json", **values)
    with pytest.raises(UserError, match="is no complete dump"):
        read_dump(tmp_path)
    save_file(experience(1) | {"weights": torch.zeros(1, 2)}, tmp_path / "update.safetensors")
    with pytest.raises(UserError, match=r"is no complete dump: .*weights is \(1, 2\), not"):
        read_dump(tmp_path)


def test_damaged_weights_of_a_dump_are_one_line(tmp_path, capsys, monkeypatch):
    def damaged(*_, **__):
        raise CheckpointError("rank 0: a/shard-00000.safetensors: is damaged")

    monkeypatch.setattr("ppo_ds.tools.replay.replay", damaged)
    assert replay.main([str(tmp_path)]) == 2
    assert line_of(capsys) == "error: rank 0: a/shard-00000.safetensors: is damaged"


@pytest.mark.parametrize("key", ["actor.model.path", "data.path", "run.dir", "reward.path"])
def test_a_name_that_is_too_long_is_one_line(tmp_path, capsys, key):
    values = {"data.path": "a/b", "run.dir": str(tmp_path / "run"), "reward.path": "math:fsum"}
    values |= {"actor.model.path": "a/b", key: f"/tmp/{'x' * 300}{'.py:f' if key == 'reward.path' else ''}"}
    with pytest.raises(UserError, match="File name too long|no such file"):
        load_config(["+experiment=rlhf", "reward=function", *(f"{k}={value}" for k, value in values.items())])


def test_an_argument_that_is_too_long_for_a_name_is_one_line(tmp_path, capsys):
    name = "x" * 300
    with pytest.raises(UserError, match="MODEL='x*': is empty or has a name of more than 255 bytes"):
        find_model(split_models([name])[0][0])
    assert export.main([str(write_run(tmp_path / "run")), str(tmp_path / name)]) == 2
    assert "File name too long" in line_of(capsys)
    assert export.main([name]) == 2 and "no such folder" in line_of(capsys)
    with pytest.raises(UserError, match="no such directory"):
        load_config(["--config-dir", name])
    with pytest.raises(UserError, match=f"^model.path={name}: "):
        load_tokenizer(name)


def test_a_text_that_would_take_all_memory_is_refused(monkeypatch):
    monkeypatch.setattr("ppo_ds.data.messages.CHARACTERS", 10)
    assert parse_prompt({"prompt": "x" * 10}, PromptFormat()) == "x" * 10
    for prompt in ("x" * 11, [{"role": "user", "content": "x" * 11}]):
        with pytest.raises(UserError, match="has more than 10 characters; shorten it or remove the row"):
            parse_prompt({"prompt": prompt}, PromptFormat())
