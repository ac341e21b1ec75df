"""Compares what this trainer and TRL's learn with equal settings.

    python benchmarks/equal_learning.py --trl-python TRL_ENV/bin/python
    python benchmarks/equal_learning.py --trl-python TRL_ENV/bin/python --model FOLDER

The first command compares PPO and GRPO on the sums of the quickstart; the second one GRPO on additions and
subtractions of reasoning-gym, starting from the chat model in FOLDER.

Both trainers start from the same weights, on the same prompts, with the settings in ``SUMS`` or
``CHAIN_SUM`` below. They save the policy every few steps, with the seconds of training so far. Then one
program measures all policies on held-out prompts, in the dtype of the run: the mean score, and the KL to the
initial policy. Each run
is a process of its own with one thread. An interrupted command continues. The tables, results.json and the
plots have all complete runs of the folder that have these settings. Without --trl-python, only this trainer
runs. docs/dev/equal_learning.md has the settings of both trainers side by side, and the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from benchmarks.equal_learning_trl import last_number
from benchmarks.options import count, trl_problem

NAMES = {"ours": "ppo_ds", "trl": "TRL"}
KLS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)  # at which the table compares the scores


@dataclass(frozen=True)
class Settings:
    """Settings of a run, which both trainers read, with names of their own: docs/dev/equal_learning.md."""

    algorithm: str  # ppo or grpo
    steps: int  # rollouts
    save_every: int  # steps between two saved policies
    prompts: int  # prompts of one rollout
    samples: int  # responses to each prompt
    epochs: int  # passes over a rollout, of one optimizer step each
    kl_coef: float
    grad_clip: float  # 0: off
    lr: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    new_tokens: int = 8
    dtype: str = "fp32"  # of forwards and generation; optimizer states and the weights it updates are fp32
    reward: str = "sums"  # or numeric: 1 if the last number of the response is the answer
    seed: int = 0


# TRL's PPOTrainer does not clip gradients, whatever its max_grad_norm
PPO = Settings("ppo", steps=60, save_every=5, prompts=256, samples=1, epochs=4, kl_coef=0.05, grad_clip=0.0)
GRPO = Settings(
    "grpo", steps=200, save_every=10, prompts=32, samples=8, epochs=1, kl_coef=0.04, grad_clip=1.0
)
REAL = Settings(
    "grpo", steps=20, save_every=5, prompts=8, samples=8, epochs=1, kl_coef=0.04, grad_clip=1.0, lr=2e-5,
    new_tokens=32, dtype="bf16", reward="numeric",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Describes the runs of one command: their settings, with arguments of the task."""

    folder: str  # in outputs/
    settings: tuple[Settings, ...]
    task: dict[str, Any]  # of ppo_ds.examples.sums.prepare; with --model, of reasoning-gym's chain_sum


SUMS = Comparison("equal_learning", (PPO, GRPO), {})
CHAIN_SUM = Comparison(
    "equal_learning_chain_sum",
    (REAL,),
    {"size": 100, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "heldout": 400},
)
QUICK = Comparison(
    "equal_learning_quick",
    tuple(replace(settings, steps=2, save_every=1, prompts=4, samples=2) for settings in SUMS.settings),
    {
        "max_operand": 9,
        "heldout": 10,
        "validation": 10,
        "hidden_size": 16,
        "heads": 2,
        "layers": 1,
        "target_accuracy": 0.001,
    },
)


def main(argv: list[str]) -> int:
    args = parsed(argv)
    comparison: Comparison = args.comparison
    start, task = args.folder / "start", comparison.task
    asked = [
        (args.folder / f"{settings.algorithm}_{trainer}_{settings.seed}", settings, trainer)
        for settings in chosen(args)
        for trainer in (("ours", "trl") if args.trl_python else ("ours",))
    ]
    for run_dir, settings, _ in asked:  # before prepare_start, which would replace the start of other runs
        if (run_dir / "clock.json").exists() and not has_settings(run_dir, settings, task):
            raise SystemExit(
                f"error: {run_dir} has a run with other settings; remove it, or choose another --folder"
            )
    if args.model:
        prepare_chain_sum(start, args.model, **task)
    else:
        prepare_start(start, task)
    for run_dir, settings, trainer in asked:
        train(run_dir, start, settings, task, args.trl_python if trainer == "trl" else None)
    runs = []
    for run_dir, settings, trainer in complete(args.folder, comparison):
        points = evaluated(run_dir, start, settings, samples=args.samples)
        runs.append(
            {
                "algorithm": settings.algorithm,
                "trainer": trainer,
                "seed": settings.seed,
                **json.loads((run_dir / "clock.json").read_text())["machine"],
                "settings": asdict(settings) | task,
                "points": points,
            }
        )
        print(f"{run_dir.name}: {summary(points)}", flush=True)
    (args.folder / "results.json").write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    for algorithm in dict.fromkeys(run["algorithm"] for run in runs):
        found = [run for run in runs if run["algorithm"] == algorithm]
        print("\n".join(["", algorithm.upper(), *table(found)]))
        draw(found, (args.plots or args.folder) / f"equal_learning_{algorithm}.png")
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="benchmarks/equal_learning.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--trl-python", help="the Python of an environment with trl==1.10.0")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    p.add_argument(
        "--algorithms", nargs="+", choices=("ppo", "grpo"), default=["ppo", "grpo"], help="default: both"
    )
    p.add_argument(
        "--model", type=Path, help="folder of a chat model for chain_sum; default: a tiny model and sums"
    )
    p.add_argument(
        "--samples", type=count, default=4, help="sampled responses per held-out prompt (default %(default)s)"
    )
    p.add_argument("--quick", action="store_true", help="tiny sizes, to test that it runs")
    p.add_argument(
        "--folder",
        type=Path,
        help="folder of models, runs, results.json and plots; default: outputs/equal_learning, with --quick "
        "outputs/equal_learning_quick, with --model outputs/equal_learning_chain_sum",
    )
    p.add_argument("--plots", type=Path, help="folder of the plots; default: the same")
    args = p.parse_args(argv)
    if args.trl_python and (problem := trl_problem(args.trl_python)):
        p.error(problem)
    args.comparison = CHAIN_SUM if args.model else QUICK if args.quick else SUMS
    args.folder = (args.folder or Path("outputs") / args.comparison.folder).resolve()
    return args


def has_settings(run_dir: Path, settings: Settings, task: dict[str, Any]) -> bool:
    """Returns whether the run was started with these settings, on the model and prompts of this task."""
    stored = json.loads((run_dir / "settings.json").read_text())
    own = {name: value for name, value in stored.items() if name not in ("folder", "run_dir")}
    return own == json.loads(json.dumps(asdict(settings) | task))


def complete(folder: Path, comparison: Comparison) -> list[tuple[Path, Settings, str]]:
    """Returns folder, settings and trainer of all complete runs of the comparison."""
    found = []
    for settings in comparison.settings:
        for trainer in NAMES:
            prefix = f"{settings.algorithm}_{trainer}_"
            names = [file.parent.name.removeprefix(prefix) for file in folder.glob(f"{prefix}*/clock.json")]
            for seed in sorted(int(name) for name in names if name.isdigit()):
                run_dir = folder / f"{prefix}{seed}"
                own = replace(settings, seed=seed)
                if has_settings(run_dir, own, comparison.task):
                    found.append((run_dir, own, trainer))
    return found


def chosen(args: argparse.Namespace) -> list[Settings]:
    """Returns the settings of all pairs of runs."""
    return [
        replace(settings, seed=seed)
        for settings in args.comparison.settings
        if settings.algorithm in args.algorithms
        for seed in args.seeds
    ]


# -- training -----------------------------------------------------------------------------------------


def prepare_start(folder: Path, task: dict[str, Any]) -> None:
    """Writes ``model/``, ``critic/``, ``train.jsonl`` and ``heldout.jsonl``.

    The model is that of +experiment=quickstart, after its supervised warm start. The critic has the same
    trunk and a head of zeros.
    """
    from transformers import AutoModelForSequenceClassification

    from ppo_ds.examples.sums import prepare

    prepare(str(folder), seed=0, **task)
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    critic.score.weight.data.zero_()
    critic.save_pretrained(folder / "critic")
    for file in (folder / "model").glob("tokenizer*"):
        (folder / "critic" / file.name).write_bytes(file.read_bytes())


def prepare_chain_sum(folder: Path, model: Path, heldout: int, **task: Any) -> None:
    """Writes ``model``, which is a link, and questions as rendered chats: train.jsonl and heldout.jsonl."""
    from ppo_ds.data.reasoning_gym import HELD_OUT_SEED, TaskRows
    from ppo_ds.models.tokenizer import load_tokenizer

    tokenizer, path = load_tokenizer(str(model)), "reasoning_gym:chain_sum"
    training = TaskRows(path, {"seed": 0} | task, "data.task")
    held_out = TaskRows(
        path, {**task, "seed": HELD_OUT_SEED, "size": heldout}, "data.eval_task", excluded=(training,)
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").unlink(missing_ok=True)
    (folder / "model").symlink_to(model.resolve())
    for name, rows in (("train", training.make()), ("heldout", held_out.make())):
        chats = [([{"role": "user", "content": row["prompt"]}], row["answer"]) for row in rows]
        lines = [{"prompt": tokenizer.render_chat(chat), "answer": answer} for chat, answer in chats]
        if name == "heldout":  # each problem once
            lines = list({line["prompt"]: line for line in lines}.values())
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def train(
    run_dir: Path, start: Path, settings: Settings, task: dict[str, Any], trl_python: str | None
) -> None:
    """Trains in a process of its own, unless the run is complete; ``trl_python`` None: with this trainer."""
    if (run_dir / "clock.json").exists():  # written last
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    values = {"folder": str(start), "run_dir": str(run_dir), **asdict(settings), **task}
    (run_dir / "settings.json").write_text(json.dumps(values, indent=1) + "\n")
    script = "equal_learning_trl.py" if trl_python else "equal_learning_ours.py"
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [trl_python or sys.executable, str(HERE / script), str(run_dir / "settings.json")]
    with (run_dir / "log.txt").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        raise SystemExit(f"error: {script} ended with exit code {code}; its output is in {run_dir}/log.txt")


# -- evaluation ---------------------------------------------------------------------------------------


def evaluated(run_dir: Path, start: Path, settings: Settings, samples: int) -> list[dict[str, float]]:
    """Returns step, seconds, CPU seconds, mean score, KL and response length of each saved policy."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from ppo_ds.models.tokenizer import load_tokenizer

    rows = [json.loads(line) for line in (start / "heldout.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(start / "model")
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    initial, policy = (
        AutoModelForCausalLM.from_pretrained(start / "model", dtype=dtype).eval() for _ in range(2)
    )
    times = json.loads((run_dir / "clock.json").read_text())["times"]
    points = []
    torch.set_num_threads(1)
    for time in [{"step": 0, "seconds": 0.0, "cpu_seconds": 0.0}, *times]:
        if time["step"]:
            policy.load_state_dict(load_file(run_dir / f"step_{time['step']}.safetensors"))
        torch.manual_seed(0)
        parts = [rows[i : i + 50] for i in range(0, len(rows), 50)]
        found = [
            (*kl_and_length(policy, initial, tokenizer, part, samples, settings.new_tokens), len(part))
            for part in parts
        ]
        kl, length = (sum(each[i] * each[2] for each in found) / len(rows) for i in (0, 1))
        score = (
            expected_score(policy, tokenizer, rows)
            if settings.reward == "sums"
            else sum(correct(policy, tokenizer, part, settings.new_tokens) for part in parts) / len(rows)
        )
        points.append({**time, "score": score, "kl": kl, "length": length})
    return points


def correct(policy: Any, tokenizer: Any, rows: list[dict[str, str]], new_tokens: int) -> int:
    """Returns the number of greedy responses whose last number is the answer."""
    prompts = [row["prompt"] for row in rows]
    ids, _, width = generated(policy, tokenizer, prompts, new_tokens, do_sample=False)
    texts = tokenizer.hf.batch_decode(ids[:, width:], skip_special_tokens=True)
    return sum(last_number(text) == int(row["answer"]) for text, row in zip(texts, rows, strict=True))


def expected_score(policy: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Returns the mean probability of the correct answer with its end token.

    This is the expected score of a response sampled at temperature 1, without sampling noise.
    """
    import torch

    from ppo_ds.examples.sums import IGNORED, encode

    ids, labels = encode(rows, tokenizer)
    targets = labels[:, 1:]
    with torch.no_grad():
        logprobs = policy(input_ids=ids).logits[:, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(targets == IGNORED, 0).sum(1).exp().mean().item()


def kl_and_length(
    policy: Any, initial: Any, tokenizer: Any, rows: list[dict[str, str]], samples: int, new_tokens: int
) -> tuple[float, float]:
    """Returns the KL of whole responses to the initial policy, in nats, and the mean length of responses.

    Responses are sampled from ``policy`` at temperature 1. At each of their tokens, including the end token,
    the KL between the two distributions over the vocabulary is exact; it is summed over the tokens.
    """
    import torch

    stop = tokenizer.stop_ids[0]
    prompts = [row["prompt"] for row in rows for _ in range(samples)]
    ids, real, width = generated(
        policy, tokenizer, prompts, new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    with torch.no_grad():
        response = ids[:, width:]
        stops = (response == stop).long()
        kept = stops.cumsum(1) - stops == 0  # up to the end token and with it
        mask = torch.cat([real, kept.long()], dim=1)
        logp, logq = (
            model(input_ids=ids, attention_mask=mask).logits[:, width - 1 : -1].float().log_softmax(-1)
            for model in (policy, initial)
        )
    kl = (logp.exp() * (logp - logq)).sum(-1).masked_fill(~kept, 0).sum(1)
    return kl.mean().item(), kept.sum(1).float().mean().item()


def generated(
    policy: Any, tokenizer: Any, prompts: list[str], new_tokens: int, **sampling: Any
) -> tuple[Any, Any, int]:
    """Returns ids of prompts and responses, the mask of the prompts, and the width of the prompts."""
    import torch

    pad, encoded = tokenizer.pad_id, tokenizer.encode_many(prompts, True)
    width = max(map(len, encoded))
    prefix = torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded])
    real = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded])
    with torch.no_grad():
        ids = policy.generate(
            input_ids=prefix,
            attention_mask=real,
            max_new_tokens=new_tokens,
            eos_token_id=tokenizer.stop_ids[0],
            pad_token_id=pad,
            **sampling,
        )
    return ids, real, width


# -- results ------------------------------------------------------------------------------------------


def summary(points: list[dict[str, float]]) -> str:
    last = points[-1]
    return (
        f"score {points[0]['score']:.3f} to {last['score']:.3f}, KL {last['kl']:.3f}, "
        f"{last['seconds']:.0f} s, {last['cpu_seconds']:.0f} CPU s"
    )


def best_score(points: list[dict[str, float]], kl: float) -> float:
    """Returns the highest score among the policies of a run whose KL is at most ``kl``.

    The KL of a run does not rise steadily, so a run has several scores at one KL.
    """
    return max(point["score"] for point in points if point["kl"] <= kl)


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Formats mean and range over the seeds of the best score within several KLs, as Markdown."""
    trainers = list(dict.fromkeys(run["trainer"] for run in runs))
    lines = [
        "| | " + " | ".join(NAMES[trainer] for trainer in trainers) + " |",
        "|---|" + "--:|" * len(trainers),
    ]

    def add(title: str, digits: int, value: Callable[[list[dict[str, float]]], float]) -> None:
        found = [[value(run["points"]) for run in runs if run["trainer"] == trainer] for trainer in trainers]
        cells = (
            f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
            for values in found
        )
        lines.append(f"| {title} | " + " | ".join(cells) + " |")

    for kl in KLS:
        add(f"best score at a KL of at most {kl:g}", 3, lambda points, kl=kl: best_score(points, kl))
    add("score after the last step", 3, lambda points: points[-1]["score"])
    add("KL after the last step, nats", 3, lambda points: points[-1]["kl"])
    add("seconds of training", 0, lambda points: points[-1]["seconds"])
    add("CPU seconds of training", 0, lambda points: points[-1]["cpu_seconds"])
    return lines


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Draws the score over KL, seconds and CPU seconds: thin lines for the seeds, thick ones for their mean.

    Over KL it is ``best_score``, with a dot for each policy. A point of a mean over time is the mean of one
    step over the seeds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, sharey=True)
    widest = max(point["kl"] for run in runs for point in run["points"])
    kls = [widest * i / 200 for i in range(201)]
    for i, trainer in enumerate(dict.fromkeys(run["trainer"] for run in runs)):
        seeds = [run["points"] for run in runs if run["trainer"] == trainer]
        thin = {"color": f"C{i}", "lw": 0.7, "alpha": 0.6}
        mean_of = f", mean of {len(seeds)} seeds" if len(seeds) > 1 else ""
        thick = {"color": f"C{i}", "lw": 2.2, "label": NAMES[trainer] + mean_of}
        for points in seeds:
            panels[0].plot(
                [p["kl"] for p in points], [p["score"] for p in points], ".", ms=3, color=f"C{i}", alpha=0.5
            )
            panels[0].plot(kls, [best_score(points, kl) for kl in kls], **thin)
        panels[0].plot(kls, [mean(best_score(points, kl) for points in seeds) for kl in kls], **thick)
        for axes, key in zip(panels[1:], ("seconds", "cpu_seconds"), strict=True):
            for points in seeds:
                axes.plot([p[key] for p in points], [p["score"] for p in points], **thin)
            steps = list(zip(*seeds, strict=True))
            axes.plot(
                [mean(p[key] for p in step) for step in steps],
                [mean(p["score"] for p in step) for step in steps],
                **thick,
            )
    labels = ("KL at most, nats per response", "seconds of training", "CPU seconds of training")
    for axes, label in zip(panels, labels, strict=True):
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="expected score, held-out prompts")
    panels[0].legend(fontsize=9)
    figure.suptitle(runs[0]["algorithm"].upper())
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
