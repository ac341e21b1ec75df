"""Tests runs of stage=sft: ranks, ZeRO stages, micro-batches, layouts and faults do not change them."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_ds.models import tiny
from ppo_ds.tracking.catalogue import find
from ppo_ds.tracking.jsonl import read_metrics
from tests.faults.test_fault_checkpoints import content
from tests.support.forked import Ranks
from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow

STEPS = 6
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
NOT_PERSISTENT = "actor.deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
UNCOMPARED = re.compile("(time|perf|mem)/|time$|health/(rank_time_spread_s|rollbacks)")
# run -> number of ranks and settings; all of them must give the numbers of the first
SAME = {
    "one": (1, ["zero=stage0"]),
    "two0": (2, ["zero=stage0"]),
    "two1": (2, ["zero=stage1"]),
    "two2": (2, ["zero=stage2"]),
    "two3": (2, ["zero=stage3", "+" + NOT_PERSISTENT]),
    "rows": (1, ["memory.train_tokens=1", "memory.score_tokens=1", "memory.layout=packed"]),
    "packed": (2, ["memory.layout=packed", "memory.train_tokens=60"]),
}


class Lab:
    """Holds a tiny chat model and chats, and runs the stage on them."""

    def __init__(self, root: Path, ranks: Ranks):
        self.root, self.ranks = root, ranks
        tokenizer = tiny.character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
        tokenizer.hf.chat_template = TEMPLATE
        torch.manual_seed(0)
        model = tiny.tiny_llama(tokenizer, hidden_size=32, layers=2, heads=4, max_tokens=64)
        tiny.save(model, tokenizer, root / "base")
        words = ["cab", "deed", "a", "feed me", "bad", "jig", "oh"]
        for name, count in (("train", 21), ("held", 5)):
            rows: list[dict[str, Any]] = []
            for i in range(count):
                turns = [words[(i + k) % 7] for k in range(2 + 2 * (i % 3))]
                roles = ("user", "assistant")
                rows.append(
                    {"messages": [{"role": roles[k % 2], "content": text} for k, text in enumerate(turns)]}
                )
            rows[1] = {"text": "feed the cab"}
            (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, name: str, *more: str, ranks: int = 2, **options: str) -> tuple[list[int], str]:
        arguments = [
            "stage=sft", f"run.dir={self.root / name}", f"run.steps={STEPS}", "run.seed=1", "run.threads=1",
            "run.timeout_minutes=2", f"actor.model.path={self.root / 'base'}", "actor.model.dtype=fp32",
            "actor.optim.lr=3e-3", "actor.optim.eps=1e-4", "actor.ema.decay=0.5", "actor.ema.evaluate=true",
            f"data.path={self.root / 'train.jsonl'}", f"data.eval_path={self.root / 'held.jsonl'}",
            "sft.batch_size=7", "sft.max_tokens=40", "sft.label_smoothing=0.1", "sft.neftune_alpha=1",
            "sft.samples=3", "sft.sample_tokens=6", "eval.every=3", "checkpoint.every=2",
            "checkpoint.keep_last=9", "health.max_skips=2",
        ]  # fmt: skip
        return self.ranks.run(ranks, [*arguments, *more], **options)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Lab:
    return Lab(tmp_path_factory.mktemp("sft"), Ranks(rank_server))


@pytest.fixture(scope="module")
def same(lab: Lab) -> dict[str, tuple[Path, str]]:
    """Returns the directories and the outputs of the runs that must give the same numbers."""
    found = {}
    for name, (ranks, more) in SAME.items():
        codes, output = lab.run(name, *more, ranks=ranks)
        assert codes == [0] * ranks, output
        found[name] = lab.root / name, output
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not UNCOMPARED.match(key)} for line in lines]


def samples(run: Path) -> list[str]:
    return [file.read_text() for file in sorted((run / "samples").iterdir())]


@pytest.mark.parametrize("other", list(SAME)[1:])
def test_ranks_zero_stages_and_micro_batches_change_nothing(same, other):
    """A batch of 7 rows does not divide evenly among two ranks. The bound is rounding over six steps."""
    for line, expected in zip(metrics(same[other][0]), metrics(same["one"][0]), strict=True):
        assert line.keys() == expected.keys()
        assert [name for name in line if find(name) is None] == []
        for name, value in line.items():
            assert value == pytest.approx(expected[name], rel=2e-4, abs=1e-5), (line["step"], name)
    for folder in ("model", "model_ema"):
        ours, theirs = (load_file(same[run][0] / folder / "model.safetensors") for run in (other, "one"))
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-5, msg=name)
    assert samples(same[other][0]) == samples(same["one"][0])


def test_a_run_learns_evaluates_and_says_what_is_learned(lab, same):
    run, output = same["one"]
    lines = metrics(run)
    assert [line["step"] for line in lines if "eval/loss" in line] == [3, 6]
    assert lines[-1]["sft/loss"] < lines[0]["sft/loss"] - 0.1 and lines[-1]["sft/epoch"] == 2.0
    last = lines[-1]
    assert last["eval/perplexity"] == pytest.approx(torch.tensor(last["eval/loss"]).exp().item(), rel=1e-5)
    banner = " ".join(output.split())
    learned = "sft.learn=assistant: every answer, or a whole text, found by rendering prefixes of each chat: "
    assert learned in banner
    assert re.search(r"learned \S+ .*: \d+ of \d+ tokens", banner), output
    rows = [
        json.loads(line) for line in (run / "samples" / "eval_step_000006.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3 and {"prompt", "asked", "response", "answer", "score"} <= rows[0].keys()


def test_the_held_out_loss_is_that_of_the_exported_averaged_model(lab, same):
    """transformers computes the loss of model_ema/ from ids and labels that are written down here."""
    run = same["one"][0]
    lm = AutoModelForCausalLM.from_pretrained(run / "model_ema").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model_ema")
    total, right, count = 0.0, 0, 0
    for row in map(json.loads, (lab.root / "held.jsonl").read_text().splitlines()):
        if "text" in row:
            ids = tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id]
            labels = [-100, *ids[1:]]
        else:
            ids, labels = [], []
            for message in row["messages"]:
                answer = message["role"] == "assistant"
                head = tokenizer(message["role"][0])["input_ids"]
                body = tokenizer(message["content"])["input_ids"] + [tokenizer.eos_token_id]
                ids += head + body
                labels += [-100] * len(head) + (body if answer else [-100] * len(body))
        ids, labels = torch.tensor([ids[:40]]), torch.tensor([labels[:40]])
        out, n = lm(input_ids=ids, labels=labels), int((labels[:, 1:] != -100).sum())
        total, count = total + float(out.loss.detach()) * n, count + n
        right += int((out.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())
    last = metrics(run)[-1]
    assert last["eval/loss"] == pytest.approx(total / count, abs=1e-5)
    assert last["eval/token_accuracy"] == pytest.approx(right / count)


def assert_same_end(run: Path, other: Path) -> None:
    """Compares the last checkpoint (except the count of rollbacks), metrics, samples and the export."""
    ends = [content(folder / "checkpoints" / f"step_{STEPS:06d}") for folder in (run, other)]
    for end in ends:
        del end["state.json"]["state"]["progress"]["rollbacks"]
    assert ends[0] == ends[1]
    assert metrics(run) == metrics(other) and samples(run) == samples(other)
    for folder in ("model", "model_ema"):
        files = [(end / folder / "model.safetensors").read_bytes() for end in (run, other)]
        assert files[0] == files[1]


@pytest.mark.parametrize(
    ("fault", "code"),
    [("kill@update:at=4:rank=1", -signal.SIGKILL), ("stop@update:at=4:rank=0", 143)],
    ids=["killed", "stopped"],
)
def test_an_interrupted_run_resumes_to_the_same_bits(lab, same, fault, code, request):
    """Exports during the run, and a trace, change nothing either."""
    name = request.node.callspec.id
    more = (*SAME["two2"][1], "checkpoint.export_every=3", "checkpoint.keep_exports=1", "run.profile=5")
    codes, output = lab.run(name, *more, fault=fault)
    assert code in codes and 0 not in codes, output
    codes, output = lab.run(name, *more)
    assert codes == [0, 0] and "resumed" in output, output
    assert_same_end(lab.root / name, same["two2"][0])
    assert [path.name for path in (lab.root / name / "step_models").iterdir()] == ["step_000006"]
    exported = lab.root / name / "step_models" / "step_000006"
    for folder in ("model", "model_ema"):
        ours, final = (load_file(end / folder / "model.safetensors") for end in (exported, lab.root / name))
        assert ours.keys() == final.keys() and all(torch.equal(ours[key], final[key]) for key in final)
    assert (lab.root / name / "profile" / "step_000005" / "trace.json.gz").exists()


def test_nonfinite_losses_roll_back_once_and_then_end_the_run_with_a_dump(lab, same):
    codes, output = lab.run("rolled", *SAME["two2"][1], NAN="loss.sft:at=4:times=2:rank=1")
    assert codes == [0, 0] and "rolled back" in output, output
    assert_same_end(lab.root / "rolled", same["two2"][0])
    codes, output = lab.run("ended", *SAME["two2"][1], NAN="loss.sft:at=4:times=0")
    assert codes == [1, 1], output
    error = json.loads((lab.root / "ended" / "summary.json").read_text())["error"]
    place = re.search(r"step 3|step 4", error)
    assert place and "not finite: loss of the actor, on rank" in error, error
    assert re.search(r"in the row \S+/train\.jsonl:\d+, prompt '", error), error
    dump = next((lab.root / "ended" / "dumps").iterdir())
    assert {"update.json", "update.safetensors", "config.yaml", "actor"} <= {f.name for f in dump.iterdir()}
    assert len(json.loads((dump / "update.json").read_text())["rows"]) == 7


def test_adapters_are_exported_alone_and_merged(lab):
    codes, output = lab.run(
        "lora", "zero=stage3", "+" + NOT_PERSISTENT, "actor.lora.rank=4", "actor.lora.lr=1e-2"
    )
    assert codes == [0, 0] and "lora       actor: rank 4, trainable parameters" in output, output
    ids = torch.arange(3, 20)[None]
    base, merged = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (lab.root / "base", lab.root / "lora" / "model")
    )
    with torch.no_grad():
        before, expected = base(input_ids=ids).logits, merged(input_ids=ids).logits
        found = PeftModel.from_pretrained(base, lab.root / "lora" / "adapter")(input_ids=ids).logits
    assert (before - expected).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_half_precision(lab):
    codes, output = lab.run("bf16", "actor.model.dtype=bf16", "actor.ema.evaluate=false", ranks=1)
    assert codes == [0], output
    lines = metrics(lab.root / "bf16")
    assert lines[-1]["sft/loss"] < lines[0]["sft/loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft.lern=all"], "error: sft.lern=all: no such key; did you mean sft.learn?"),
        (["sft.learn=answers"], "error: sft.learn=answers"),
        (["sampling.top_k=1"], "error: sampling: stage=sft does not use this section"),
        (["sft.batch_size=50"], "21 texts are fewer than one step takes (sft.batch_size=50)"),
        (["sft.max_tokens=2"], "(20 more are dropped: raise sft.max_tokens)"),
    ],
)
def test_mistakes_are_reported_in_one_line(lab, arguments, message):
    codes, output = lab.run("mistake", *arguments, ranks=1)
    assert codes == [2] and message in output and "Traceback" not in output, output
