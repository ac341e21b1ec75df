"""Tests runs of stage=reward_model: ranks, ZeRO stages, micro-batches, layouts and faults change nothing."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ppo_ds.tools.export import export
from ppo_ds.tracking.catalogue import find
from ppo_ds.tracking.jsonl import read_metrics
from tests.data.conftest import make_tokenizer
from tests.faults.test_fault_checkpoints import content
from tests.finetune.preference_cases import ENCODERS, LLAMA, rows, save_lm, write
from tests.support.forked import Ranks
from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow

STEPS = 6
NOT_PERSISTENT = "+scorer.deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
UNCOMPARED = re.compile("(time|perf|mem)/|time$|health/(rank_time_spread_s|rollbacks)")
# run -> number of ranks and settings; all of them must give the numbers of the first
SAME = {
    "one": (1, ["zero=stage0"]),
    "two0": (2, ["zero=stage0"]),
    "two1": (2, ["zero=stage1"]),
    "two2": (2, ["zero=stage2"]),
    "two3": (2, ["zero=stage3", NOT_PERSISTENT]),
    "packed": (2, ["memory.layout=packed", "memory.train_tokens=50", "memory.score_tokens=1"]),
}
ENCODER = {"encoder_one": (1, ["zero=stage0"]), "encoder_two": (2, ["zero=stage3", NOT_PERSISTENT])}


class Lab:
    """Holds a tiny language model, a tiny encoder and preference pairs, and runs the stage on them."""

    def __init__(self, root: Path, ranks: Ranks):
        self.root, self.ranks = root, ranks
        tokenizer = make_tokenizer(adds_bos=True)
        self.models = {
            "one": save_lm(root / "lm", LLAMA, tokenizer),
            "encoder": save_lm(root / "bert", ENCODERS["bert"], tokenizer),
        }
        write(root / "train.jsonl", rows(20, margin=0.2) + rows(2, seed=3))
        write(root / "held.jsonl", rows(5, seed=1, subset="easy") + rows(4, seed=2))

    def run(self, name: str, *more: str, ranks: int = 2, **options: str) -> tuple[list[int], str]:
        model = self.models["encoder" if name.startswith("encoder") else "one"]
        arguments = [
            "stage=reward_model", f"run.dir={self.root / name}", f"run.steps={STEPS}", "run.threads=1",
            "run.timeout_minutes=2", f"scorer.model.path={model}", "scorer.model.dtype=fp32",
            "scorer.optim.lr=3e-3", "scorer.optim.eps=1e-4", "scorer.ema.decay=0.5",
            f"data.path={self.root / 'train.jsonl'}", f"data.eval_path={self.root / 'held.jsonl'}",
            "reward_model.batch_size=7", "reward_model.max_tokens=40", "reward_model.label_smoothing=0.1",
            "eval.every=3", "checkpoint.every=2", "checkpoint.keep_last=9", "health.max_skips=2",
        ]  # fmt: skip
        return self.ranks.run(ranks, [*arguments, *more], **options)

    def runs(self, cases: dict[str, tuple[int, list[str]]]) -> dict[str, Path]:
        for name, (ranks, more) in cases.items():
            codes, output = self.run(name, *more, ranks=ranks)
            assert codes == [0] * ranks, output
        return {name: self.root / name for name in cases}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Lab:
    return Lab(tmp_path_factory.mktemp("reward_model"), Ranks(rank_server))


@pytest.fixture(scope="module")
def same(lab: Lab) -> dict[str, Path]:
    return lab.runs(SAME)


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not UNCOMPARED.match(key)} for line in lines]


def assert_equal_numbers(run: Path, other: Path) -> None:
    """Compares metrics and weights up to rounding over the steps."""
    for line, expected in zip(metrics(run), metrics(other), strict=True):
        assert line.keys() == expected.keys()
        assert [name for name in line if find(name) is None] == []
        for name, value in line.items():
            assert value == pytest.approx(expected[name], rel=5e-4, abs=2e-5), (line["step"], name)
    for folder in ("model", "model_ema"):
        ours, theirs = (load_file(end / folder / "model.safetensors") for end in (run, other))
        assert ours.keys() == theirs.keys()
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=3e-5, msg=name)


@pytest.mark.parametrize("other", list(SAME)[1:])
def test_ranks_zero_stages_and_micro_batches_change_nothing(same, other):
    """A batch of 7 pairs does not divide evenly among two ranks."""
    assert_equal_numbers(same[other], same["one"])


def test_an_encoder_learns_the_same_on_two_ranks_with_sharded_weights(lab):
    runs = lab.runs(ENCODER)
    assert_equal_numbers(runs["encoder_two"], runs["encoder_one"])
    lines = metrics(runs["encoder_one"])
    assert lines[-1]["rm/loss"] < lines[0]["rm/loss"]


def test_a_run_learns_and_evaluates(same):
    lines = metrics(same["one"])
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [3, 6]
    last = lines[-1]
    assert last["rm/loss"] < lines[0]["rm/loss"] and last["eval/loss"] < lines[2]["eval/loss"]
    assert 0 <= last["eval/accuracy/easy"] <= 1
    assert last["episodes"] == 7 * STEPS and last["rm/epoch"] == pytest.approx(42 / 22)
    samples = (same["one"] / "samples" / "eval_step_000006.jsonl").read_text().splitlines()
    assert {"prompt", "rejected", "response", "score", "subset"} <= json.loads(samples[0]).keys()


@pytest.mark.parametrize("folder", ["model", "model_ema"])
def test_the_export_is_a_plain_classifier_with_the_statistics_of_its_scores(lab, same, folder):
    path = same["two3"] / folder
    model = AutoModelForSequenceClassification.from_pretrained(path)
    held = [json.loads(line) for line in (lab.root / "held.jsonl").read_text().splitlines()]
    texts = [f"{row['prompt']} {row[name]}" for row in held for name in ("chosen", "rejected")]
    inputs = AutoTokenizer.from_pretrained(path)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**inputs).logits[:, 0].double()
    config = model.config
    assert (config.num_labels, config.score_template) == (1, "text")
    assert config.score_mean == pytest.approx(float(scores.mean()), abs=1e-5)
    assert config.score_std == pytest.approx(float(scores.std(correction=0)), rel=1e-4)
    if folder == "model":
        chosen, rejected = scores.view(-1, 2).unbind(1)
        last = metrics(same["two3"])[-1]
        assert last["eval/accuracy"] == pytest.approx(float((chosen > rejected).double().mean()))
        assert last["eval/margin_mean"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-4)


def test_a_checkpoint_is_exported_like_the_run_itself(same, tmp_path):
    for role, folder in (("scorer", "model"), ("ema", "model_ema")):
        out = export(same["two2"] / "checkpoints" / f"step_{STEPS:06d}", role, tmp_path / folder)
        weights = [(end / "model.safetensors").read_bytes() for end in (out, same["two2"] / folder)]
        assert weights[0] == weights[1]
        ours, theirs = (AutoTokenizer.from_pretrained(end) for end in (out, same["two2"] / folder))
        assert (ours.pad_token_id, ours.padding_side) == (theirs.pad_token_id, theirs.padding_side)
        ours, theirs = (json.loads((end / "config.json").read_text()) for end in (out, same["two2"] / folder))
        if role == "ema":  # its scores are measured at the end of the run only
            theirs = {
                name: value for name, value in theirs.items() if name not in ("score_mean", "score_std")
            }
        assert ours == theirs


def assert_same_end(run: Path, other: Path) -> None:
    """Compares the last checkpoint (except the count of rollbacks), metrics and the export."""
    ends = [content(folder / "checkpoints" / f"step_{STEPS:06d}") for folder in (run, other)]
    for end in ends:
        del end["state.json"]["state"]["progress"]["rollbacks"]
    assert ends[0] == ends[1] and metrics(run) == metrics(other)
    for folder in ("model", "model_ema"):
        for file in ("model.safetensors", "config.json"):
            assert (run / folder / file).read_bytes() == (other / folder / file).read_bytes()


@pytest.mark.parametrize(
    ("fault", "code"),
    [("kill@update:at=4:rank=1", -signal.SIGKILL), ("stop@update:at=4:rank=0", 143)],
    ids=["killed", "stopped"],
)
def test_an_interrupted_run_resumes_to_the_same_bits(lab, same, fault, code, request):
    """Exports during the run, and a trace, change nothing either."""
    name = request.node.callspec.id
    more = (*SAME["two2"][1], "checkpoint.export_every=4", "run.profile=5")
    codes, output = lab.run(name, *more, fault=fault)
    assert code in codes and 0 not in codes, output
    codes, output = lab.run(name, *more)
    assert codes == [0, 0] and "resumed" in output, output
    assert_same_end(lab.root / name, same["two2"])
    (exported,) = (lab.root / name / "step_models").iterdir()
    saved = lab.root / name / "checkpoints" / exported.name
    for role, folder in (("scorer", "model"), ("ema", "model_ema")):
        by_hand = export(saved, role, lab.root / f"{name}_{role}")
        for file in ("config.json", "model.safetensors"):
            assert (exported / folder / file).read_bytes() == (by_hand / file).read_bytes()
    assert (lab.root / name / "profile" / "step_000005" / "trace.json.gz").exists()


def test_nonfinite_losses_roll_back_once_and_then_end_the_run_with_a_dump(lab, same):
    codes, output = lab.run("rolled", *SAME["two2"][1], NAN="loss.scorer:at=4:times=2:rank=1")
    assert codes == [0, 0] and "rolled back" in output, output
    assert_same_end(lab.root / "rolled", same["two2"])
    codes, output = lab.run("ended", *SAME["two2"][1], NAN="loss.scorer:at=4:times=0")
    assert codes == [1, 1], output
    error = json.loads((lab.root / "ended" / "summary.json").read_text())["error"]
    assert re.search(
        r"step [34]: not finite: loss of the scorer, on rank \d, in pair \d of the step", error
    ), error
    dump = next((lab.root / "ended" / "dumps").iterdir())
    assert {"update.json", "update.safetensors", "config.yaml", "scorer"} <= {f.name for f in dump.iterdir()}
    assert len(json.loads((dump / "update.json").read_text())["rows"]) == 7


def test_adapters_in_half_precision_are_merged_into_the_export(lab):
    more = ["scorer.lora.rank=4", "scorer.lora.lr=1e-2", "scorer.model.dtype=bf16"]
    codes, output = lab.run("lora", "zero=stage3", NOT_PERSISTENT, *more)
    assert codes == [0, 0] and "lora       scorer: rank 4, trainable parameters" in output, output
    lines = metrics(lab.root / "lora")
    assert lines[-1]["rm/loss"] < lines[0]["rm/loss"]
    weights = load_file(lab.root / "lora" / "model" / "model.safetensors")
    base = load_file(lab.root / "lm" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert not any("lora" in each for each in weights) and weights[name].dtype == torch.bfloat16
    assert (weights[name].float() - base[name]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["reward_model.margn=true"],
            "reward_model.margn=true: no such key; did you mean reward_model.margin?",
        ),
        (["actor.optim.lr=1"], "actor: stage=reward_model does not use this section"),
        (["eval.greedy=false"], "eval.greedy=false: stage=reward_model does not use this key; remove it"),
        (["reward_model.batch_size=50"], "22 pairs are fewer than one step takes"),
        (["reward_model.max_tokens=2"], "0 tied, and 22 longer than reward_model.max_tokens=2; raise it"),
        (["data.prompt_column=ask"], "train.jsonl:1: data.prompt_column=ask: no such column; the row has:"),
    ],
)
def test_mistakes_are_reported_in_one_line(lab, arguments, message):
    codes, output = lab.run("mistake", *arguments, ranks=1)
    assert codes == [2] and message in output and "Traceback" not in output, output
