"""Tests a change from two ranks to one and back to two, without a loss of state.

Exporting any checkpoint gives the model that its run would have saved.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launch import export
from ppo_ds.run.export import MARKER
from ppo_ds.tools import model_card
from tests.faults.worlds_worker import CASES, SAVED, UNEVEN, checkpoint
from tests.invariant import invariant_assets
from tests.support.ranks import RankServer
from tests.support.run_files import compared as steps
from tests.support.run_files import tensors

pytestmark = pytest.mark.slow

PATIENCE = 1500  # seconds until a hang fails the test; a hanging case prints its stacks long before
EVERY = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Path:
    root = tmp_path_factory.mktemp("worlds")
    invariant_assets.make(root)
    rows = [
        {"prompt": prompt, "max_new_tokens": 10 if i % 4 < 2 else 1}
        for i, prompt in enumerate(2 * invariant_assets.PROMPTS)
    ]
    (root / "uneven.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:16]))
    for part, ranks in (("train", 2), ("train_unevenly", 2), ("take_over", 1), ("take_back", 2)):
        rank_server.check(f"tests.faults.worlds_worker:{part}", ranks, str(root), limit=PATIENCE)
    return root


def counters(folder: Path) -> dict[str, Any]:
    """Returns all states of the loop, its parts and the models that are not tensors."""
    found = {"loop": json.loads((folder / "state.json").read_text())["state"]}
    for file in folder.glob("*/model.json"):
        about = json.loads(file.read_text())
        found[file.parent.name] = {
            name: about[name] for name in ("steps", "adam_steps", "loss_scaler", "settings")
        }
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Asserts that two sets of tensors are bit-identical."""
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@EVERY
def test_weights_moments_and_counters_go_from_two_ranks_to_one_and_back(root: Path, case: str) -> None:
    saved = checkpoint(root / "two" / case)
    found = tensors(saved)
    assert any(name.startswith("actor/exp_avg_sq/") for name in found) and any(
        name.startswith("critic/exp_avg/") for name in found
    )
    assert any(name.startswith("ema/") for name in found) == ("ema" in CASES[case].get("actor", {}))
    state = counters(saved)
    assert state["actor"]["steps"] == SAVED and set(state["actor"]["adam_steps"].values()) == {SAVED}
    assert state["loop"]["progress"]["episodes"] == 8 * SAVED and {"kl", "prompts", "scores"} <= set(
        state["loop"]
    )
    for where in ("one", "back"):
        assert_same(found, tensors(checkpoint(root / where / case)))
        assert counters(checkpoint(root / where / case)) == state


@EVERY
def test_the_run_ends_as_if_it_had_never_left(root: Path, case: str) -> None:
    """Compares the metrics of all later steps, the models and the optimizer states bit for bit."""
    stayed, returned = root / "two" / case, root / "back" / case
    assert len(steps(stayed)) == 4 and steps(stayed)[SAVED:] == steps(returned)
    assert steps(stayed)[2] != steps(stayed)[3]
    last = Path("checkpoints/step_000004")
    assert_same(tensors(stayed / last), tensors(returned / last))
    assert counters(stayed / last) == counters(returned / last)
    assert files(stayed / "model") == files(returned / "model")


@EVERY
def test_one_rank_trains_on(root: Path, case: str) -> None:
    lines = steps(root / "one" / case)
    assert [line["step"] for line in lines] == [3, 4] and [line["episodes"] for line in lines] == [24, 32]
    assert all(
        math.isfinite(line[name])
        for line in lines
        for name in ("policy/loss", "value/loss", "policy/grad_norm")
    )
    for line, stayed in zip(lines, steps(root / "two" / case)[SAVED:], strict=True):
        exact = CASES[case].get("dtype") is None
        for name in ("reward/score_mean", "value/loss", "policy/grad_norm") if exact else ():
            assert line[name] == pytest.approx(stayed[name], rel=1e-4), name


# -- exports ---------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    for name in [name for name in found if name.endswith("adapter_config.json")]:
        found[name] = json.loads(found[name])
        found[name]["target_modules"].sort()  # peft writes a set, in arbitrary order
    for name in [name for name in found if name.endswith("tokenizer_config.json")]:
        found[name] = json.loads(found[name])
        found[name].pop("local_files_only", None)  # depends on whether the writing process was offline
    return found


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports no curves, because a plot takes a second, and no test reads it."""
    monkeypatch.setattr(model_card, "plot_curves", lambda *_, **__: False)


def without_cards(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Splits the files of an export into those of the model and the model cards, without their results.

    A run itself writes no cards. The results are metrics of the run that saved the checkpoint.
    """
    cards = {name: text.decode() for name, text in found.items() if Path(name).name == model_card.CARD}
    for name, card in cards.items():
        cards[name] = re.sub(r"## Results\n.*(?=## Settings\n)", "", card, flags=re.DOTALL)
        assert "\n## Settings\n" in card
    return {name: content for name, content in found.items() if name not in cards}, cards


def export_to(out: Path, *arguments: str) -> Path:
    assert export.main([*arguments[:1], str(out), *arguments[1:]]) == 0
    return out


@EVERY
def test_an_export_is_the_folder_that_the_run_left(root: Path, tmp_path: Path, case: str) -> None:
    run_dir = root / "two" / case
    left = files(run_dir / "model") | {
        f"adapter/{name}": content for name, content in files(run_dir / "adapter").items()
    }
    assert ("adapter/adapter_model.safetensors" in left) == (case == "lora")
    cards = {"README.md"}
    if case == "lora":  # the adapter of an export is complete without the model's folder
        left |= {f"adapter/{name}": left[name] for name in ("tokenizer.json", "tokenizer_config.json")}
        cards.add("adapter/README.md")
    exported, described = without_cards(files(export_to(tmp_path / "actor", str(run_dir))))
    assert exported == left and described.keys() == cards
    folders = {"critic": "critic"} | ({"ema": "model_ema"} if (run_dir / "model_ema").exists() else {})
    for role, folder in folders.items():
        out = export_to(tmp_path / role, str(run_dir), f"--role={role}")
        exported, described = without_cards(files(out))
        assert exported == files(run_dir / folder) and described.keys() == {"README.md"}


@EVERY
def test_an_export_during_the_run_is_that_of_the_checkpoint(root: Path, tmp_path: Path, case: str) -> None:
    run_dir = root / "two" / case
    exported = files(run_dir / "step_models" / "step_000002")
    roles = {"actor": "model", "critic": "critic"}
    roles |= {"ema": "model_ema"} if "ema" in CASES[case].get("actor", {}) else {}
    for role, folder in roles.items():
        out = export_to(tmp_path / role, str(run_dir), f"--step={SAVED}", f"--role={role}")
        for name, content in without_cards(files(out))[0].items():
            inside = name if name.startswith("adapter/") else f"{folder}/{name}"
            assert inside not in exported or exported.pop(inside) == content, inside
    assert [*exported] == [MARKER]  # nothing else was written
    last = run_dir / "step_models" / "step_000004"
    for folder in [path.name for path in last.iterdir() if path.is_dir()]:
        assert files(last / folder) == files(run_dir / folder)


@EVERY
def test_an_earlier_step_is_another_model_and_has_the_weights_of_its_masters(
    root: Path, tmp_path: Path, case: str
) -> None:
    run_dir = root / "two" / case
    early = export_to(tmp_path / "early", str(run_dir), "--step=2")
    assert files(early)["model.safetensors"] != files(run_dir / "model")["model.safetensors"]
    # except for the results, an export does not depend on the run that saved the checkpoint
    same = export_to(tmp_path / "same", str(checkpoint(root / "one" / case)))
    assert without_cards(files(early)) == without_cards(files(same))
    masters = tensors(checkpoint(run_dir))
    for name, weight in load_file(early / "model.safetensors").items():
        master = masters.get(f"actor/weight/lm.{name}")
        assert (master is None) == (case == "lora")
        assert master is None or torch.equal(weight, master.to(weight.dtype)), name


# -- answers of very different lengths -------------------------------------------------------------


def test_a_rank_whose_answers_are_short_waits_for_the_other_and_learns_the_same(root: Path) -> None:
    """Compares ZeRO-3 on two ranks to one rank without ZeRO."""
    alone, both = (steps(root / where / UNEVEN) for where in ("one", "two"))
    rows = [
        json.loads(line)
        for line in (root / "two" / UNEVEN / "samples" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert [row["length"] for row in rows] == [10, 10, 10, 10, 1, 1, 1, 1]
    assert len(both) == 2
    for line, other in zip(alone, both, strict=True):
        assert line.keys() == other.keys()
        for name in ("reward/score_mean", "policy/loss", "value/loss", "policy/grad_norm", "value/grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    for role in ("model", "critic"):
        mine, theirs = (
            load_file(root / where / UNEVEN / role / "model.safetensors") for where in ("one", "two")
        )
        for name, weight in mine.items():
            torch.testing.assert_close(weight, theirs[name], rtol=0, atol=2e-5, msg=name)
