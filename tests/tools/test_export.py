"""Tests launch/export.py on a hand-written checkpoint: the exported weights and the error messages."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import export
from ppo_ds.models import tiny
from tests.support.environment import ROOT, run_python

STEP = "checkpoints/step_000002"


def write_base(folder: Path, layers: int = 1) -> None:
    torch.manual_seed(0)
    tokenizer = tiny.character_tokenizer("abc")
    tiny.save(
        tiny.tiny_llama(tokenizer, hidden_size=8, layers=layers, heads=2, max_tokens=16), tokenizer, folder
    )


def write_checkpoint(folder: Path, weights: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Writes a checkpoint of one model in two fp32 shards.

    The format is described in engine/checkpoint/checkpoints.py and engine/checkpoint/state.py.
    """
    (folder / "actor").mkdir(parents=True)
    names = list(weights)
    shards = {name: f"shard-0000{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(shards.values()):
        mine = {name: weights[name] for name in names if shards[name] == file}
        held = {f"weight/{name}": x for name, x in mine.items()} | {
            f"exp_avg/{name}": torch.zeros_like(x) for name, x in mine.items()
        }
        save_file(held, folder / "actor" / file)
    save_file({}, folder / "actor" / "buffers.safetensors")
    (folder / "actor" / "model.json").write_text(
        json.dumps({"format": 1, "dtype": "bfloat16", "shards": shards})
    )
    about = {"format": 1, "step": 2, "models": ["actor"], "shadows": [], "state": {}, "settings": settings}
    (folder / "state.json").write_text(json.dumps(about))
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    entries = {
        name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for name, file in files.items()
    }
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": entries}))


def trained(base: Path) -> dict[str, Tensor]:
    """Returns weights that bf16 cannot represent, so that rounding is visible."""
    return {f"lm.{name}": x + 1 / 3 for name, x in load_file(base / "model.safetensors").items()}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def write_run(run_dir: Path, **model: Any) -> Path:
    """Writes a run whose base model is in the run directory, where `prepare` would have made it."""
    write_base(run_dir / "start")
    settings = {
        "run": {"dir": str(run_dir)},
        "actor": {"model": {"path": f"{run_dir}/start", "dtype": "bf16", **model}},
        "rollout": {"prompts_per_step": 4},
        "sampling": {"max_new_tokens": 4},
        "reward": {"_target_": "gone.with.the.machine"},
    }
    write_checkpoint(run_dir / STEP, trained(run_dir / "start"), settings)
    return run_dir


def test_the_exported_weights_are_the_rounded_masters(run_dir: Path, tmp_path: Path) -> None:
    assert export.main([str(run_dir)]) == 0
    out = run_dir / "exports" / "step_000002" / "model"
    lm = AutoModelForCausalLM.from_pretrained(out)
    assert lm.dtype == torch.bfloat16
    expected = trained(run_dir / "start")
    for name, weight in lm.state_dict().items():
        assert torch.equal(weight, expected[f"lm.{name}"].bfloat16()), name
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tiny.character_tokenizer("abc").hf.get_vocab()
    assert not (out / "adapter").exists() and [file.name for file in out.parent.iterdir()] == ["model"]


def test_a_checkpoint_of_supervised_fine_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_base(tmp_path / "start")
    settings = {
        "stage": "sft",
        "run": {"dir": str(tmp_path / "run")},
        "actor": {"model": {"path": str(tmp_path / "start")}},
    }
    weights = trained(tmp_path / "start")
    write_checkpoint(tmp_path / "run" / STEP, weights, settings)
    assert export.main([str(tmp_path / "run")]) == 0
    exported = load_file(tmp_path / "run" / "exports" / "step_000002" / "model" / "model.safetensors")
    for name, weight in weights.items():
        assert torch.equal(exported[name.removeprefix("lm.")], weight.bfloat16()), name
    assert capsys.readouterr().out.startswith("step_000002, actor: ")
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--role=critic"]) == 2
    assert "--role=critic: " in capsys.readouterr().err


def test_export_of_a_run_that_a_restart_has_moved(run_dir: Path, tmp_path: Path) -> None:
    """The folder that `prepare` made stays in the run directory."""
    (run_dir / "earlier_1").mkdir()
    (run_dir / "checkpoints").rename(run_dir / "earlier_1" / "checkpoints")
    assert export.main([str(run_dir / "earlier_1"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_export_from_another_folder_of_a_moved_run(run_dir: Path, tmp_path: Path) -> None:
    moved = run_dir.rename(tmp_path / "moved")
    (tmp_path / "work").mkdir()
    script = str(ROOT / "launch" / "export.py")
    done = run_python(script, "../moved", "mine", "--step", "2", cwd=tmp_path / "work")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"step_000002, actor: {tmp_path / 'work' / 'mine'}\n" and done.stderr == ""
    assert (tmp_path / "work" / "mine" / "model.safetensors").exists() and not (moved / "exports").exists()


def test_force_replaces_the_whole_folder(run_dir: Path, tmp_path: Path) -> None:
    write_base(tmp_path / "out")
    (tmp_path / "out" / "model-00002-of-00002.safetensors").write_text("of another model")
    assert export.main([str(run_dir / STEP), str(tmp_path / "out"), "--force"]) == 0
    assert not (tmp_path / "out" / "model-00002-of-00002.safetensors").exists()
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"],
        trained(run_dir / "start")["lm.lm_head.weight"].bfloat16(),
    )


def flip_a_byte(run_dir: Path) -> None:
    file = run_dir / STEP / "actor" / "shard-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def lose_a_file(run_dir: Path) -> None:
    (run_dir / STEP / "actor" / "shard-00000.safetensors").unlink()


def lose_the_manifest(run_dir: Path) -> None:
    (run_dir / STEP / "manifest.json").unlink()


def point_elsewhere(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "best").write_text("../start\n")


def lose_the_base(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "start")


def another_base(run_dir: Path) -> None:
    lose_the_base(run_dir)
    write_base(run_dir / "start", layers=2)


def lose_the_checkpoints(run_dir: Path) -> None:
    shutil.rmtree(run_dir / STEP)


def nothing(run_dir: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("happens", "arguments", "words"),
    [
        (nothing, ["RUN/nowhere"], ["RUN/nowhere: no such folder"]),
        (lose_the_checkpoints, ["RUN"], ["RUN: contains no checkpoint"]),
        (nothing, ["RUN", "--step=3"], ["--step=3", "available steps: 2"]),
        (nothing, ["RUN", "--best"], ["--best", "checkpoint.keep_best"]),
        (point_elsewhere, ["RUN", "--best"], ["--best: no such checkpoint", "available steps: 2"]),
        (nothing, [f"RUN/{STEP}", "--best"], ["is a single checkpoint"]),
        (nothing, ["RUN", "--role=critic"], ["--role=critic", "it holds actor"]),
        (nothing, ["RUN", "--role=reward"], ["--role", "reward", "--help"]),
        (nothing, ["RUN", "RUN/start"], ["RUN/start: exists", "--force"]),
        (
            nothing,
            ["RUN", "RUN/checkpoints", "--force"],
            ["RUN/checkpoints: exists and is not a model folder"],
        ),
        (nothing, ["RUN", "RUN/start/config.json/out"], ["RUN/start/config.json/out: cannot be written"]),
        (
            flip_a_byte,
            ["RUN"],
            ["step_000002: is damaged", "actor/shard-00001.safetensors has changed since it was written"],
        ),
        (lose_a_file, ["RUN"], ["step_000002: is damaged", "actor/shard-00000.safetensors is missing"]),
        (lose_the_manifest, ["RUN"], ["step_000002: is damaged", "manifest.json"]),
        (lose_the_base, ["RUN"], ["step_000002: actor.model.path=RUN/start", "no such folder"]),
        (
            another_base,
            ["RUN"],
            ["step_000002/actor: was saved from another model", "it lacks lm.model.layers.1."],
        ),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(
    run_dir: Path,
    capsys: pytest.CaptureFixture,
    happens: Callable[[Path], None],
    arguments: list[str],
    words: list[str],
) -> None:
    happens(run_dir)
    before = sorted(run_dir.rglob("*"))
    assert export.main([argument.replace("RUN", str(run_dir)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in error
    for word in words:
        assert word.replace("RUN", str(run_dir)) in line
    assert sorted(run_dir.rglob("*")) == before


def test_stored_trust_does_not_replace_the_users(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_dir = write_run(tmp_path / "run", trust_remote_code=True)
    assert export.main([str(run_dir)]) == 2
    assert "actor.model.trust_remote_code=true" in capsys.readouterr().err
    assert export.main([str(run_dir), "--trust-remote-code"]) == 0


def test_the_newest_checkpoint_is_exported_or_the_best_on_request(run_dir: Path, tmp_path: Path) -> None:
    checkpoints = run_dir / "checkpoints"
    shutil.copytree(checkpoints / "step_000002", checkpoints / "step_000010")
    (checkpoints / ".tmp_step_000012").mkdir()
    (checkpoints / "best").write_text("step_000002\n")
    assert export.main([str(run_dir)]) == export.main([str(checkpoints), "--best"]) == 0
    assert sorted(folder.name for folder in (run_dir / "exports").iterdir()) == ["step_000002", "step_000010"]
