"""Measures the over-optimization of learned rewards against a known one (Gao et al. 2022, arXiv 2210.10760).

    python benchmarks/gold_reward.py

The task is sums of two-digit numbers. ``gold`` grades an answer by its distance from the sum. Preference
labels are drawn from it by the Bradley-Terry model, P(a is preferred to b) = sigmoid(gold(a) - gold(b)). One
reward model, the proxy, is trained on each of three numbers of pairs, and PPO maximizes each proxy without a
KL penalty. The plot shows the mean proxy and gold reward of the sampled responses over sqrt(KL), the
square root of the KL to the SFT model.

All models are trained by launch/train.py on one rank with one thread: SFT once, then a reward model and a PPO
run for each number of pairs. An interrupted command continues where it stopped. The results are in
docs/dev/gold_reward.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, or imported by its path as the reward of a run

from ppo_ds.examples.sums import prepare_stages, problems, wrong_answer

WORST = -5.0  # gold reward of an answer that is no number, or that differs from the sum by more than 30
CORRECT = 0.25  # share of correct answers among those that are compared


@dataclass(frozen=True)
class Sizes:
    """Numbers of pairs, steps and rows of the experiment."""

    pairs: tuple[int, ...]  # numbers of preference pairs, one reward model each
    heldout_pairs: int
    task: dict[str, int]  # arguments of prepare_stages
    sft_steps: int
    reward_model_steps: int
    reward_model_batch: int
    ppo_steps: int
    prompts: int  # prompts of one PPO step
    minibatch: int
    seed: int = 0


FULL = Sizes(
    pairs=(300, 1500, 7500),
    heldout_pairs=2000,
    task={"min_operand": 10, "max_operand": 49, "heldout": 400},
    sft_steps=75,
    reward_model_steps=300,
    reward_model_batch=128,
    ppo_steps=60,
    prompts=256,
    minibatch=128,
)
QUICK = Sizes(
    pairs=(8, 16),
    heldout_pairs=8,
    task={"min_operand": 0, "max_operand": 9, "heldout": 20, "hidden_size": 16, "heads": 2},
    sft_steps=2,
    reward_model_steps=2,
    reward_model_batch=8,
    ppo_steps=2,
    prompts=8,
    minibatch=8,
)


def main(argv: list[str]) -> int:
    args = parsed(argv)
    sizes, folder = (QUICK if args.quick else FULL), args.folder
    start = folder / "start"
    prepare_stages(str(start), seed=sizes.seed, pairs=1, heldout_pairs=1, **sizes.task)
    write_pairs(sizes, folder)
    train(folder / "sft", sft_keys(sizes, start))
    studies = []
    for count in sizes.pairs:
        proxy, ppo = folder / f"reward_model_{count}", folder / f"ppo_{count}"
        train(proxy, reward_model_keys(sizes, folder, count))
        train(ppo, ppo_keys(sizes, folder, proxy))
        studies.append({"pairs": count, **accuracy(proxy), "steps": curve(ppo)})
    best = best_accuracy(read_lines(folder / "heldout_pairs.jsonl"))
    (folder / "results.json").write_text(json.dumps({"best_accuracy": best, "studies": studies}, indent=1))
    print("\n".join(table(studies, best)))
    draw(studies, args.plot or folder / "gold_reward.png")
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="benchmarks/gold_reward.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--quick", action="store_true", help="tiny sizes, to test that it runs")
    p.add_argument(
        "--folder",
        type=Path,
        default=Path("outputs/gold_reward"),
        help="folder of data and runs (default %(default)s)",
    )
    p.add_argument("--plot", type=Path, help="file of the plot; default: gold_reward.png in the folder")
    args = p.parse_args(argv)
    args.folder = args.folder.resolve()
    return args


# -- the known reward and its preferences -----------------------------------------------------------


def gold(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Returns -log2(1 + distance from the sum) of each response, at least WORST; WORST if it is no number."""
    return [grade(response, row["answer"]) for response, row in zip(responses, rows, strict=True)]


def grade(response: str, answer: str) -> float:
    """Returns the gold reward of one response. A text with leading zeros does not count as a number."""
    if not response.isdecimal() or response != str(int(response)):
        return WORST
    return max(WORST, -math.log2(1 + abs(int(response) - int(answer))))


def write_pairs(sizes: Sizes, folder: Path) -> None:
    """Writes heldout_pairs.jsonl, and for each number N of pairs the first N of one list to pairs_N.jsonl."""
    rows = problems(sizes.task["max_operand"], sizes.seed, sizes.task["min_operand"])
    heldout = sizes.task["heldout"]
    pairs = draw_pairs(rows[heldout:], max(sizes.pairs), random.Random(sizes.seed))
    for count in sizes.pairs:
        write_lines(folder / f"pairs_{count}.jsonl", pairs[:count])
    heldout_pairs = draw_pairs(rows[:heldout], sizes.heldout_pairs, random.Random(sizes.seed + 1))
    write_lines(folder / "heldout_pairs.jsonl", heldout_pairs)


def draw_pairs(rows: list[dict[str, str]], count: int, generator: random.Random) -> list[dict[str, Any]]:
    """Draws pairs of answers to random problems, with labels by the Bradley-Terry model of ``gold``.

    ``difference`` is gold(chosen) - gold(rejected).
    """
    pairs = []
    while len(pairs) < count:
        row = generator.choice(rows)
        first, second = (
            row["answer"] if generator.random() < CORRECT else wrong_answer(row["answer"], generator)
            for _ in range(2)
        )
        difference = grade(first, row["answer"]) - grade(second, row["answer"])
        if first == second:
            continue
        if generator.random() >= 1 / (1 + math.exp(-difference)):
            first, second, difference = second, first, -difference
        pairs.append({"prompt": row["prompt"], "chosen": first, "rejected": second, "difference": difference})
    return pairs


def best_accuracy(pairs: list[dict[str, Any]]) -> float:
    """Returns the share of labels that agree with ``gold``; answers of equal gold reward count half.

    No reward model has a higher expected accuracy on these labels.
    """
    return sum((pair["difference"] > 0) + 0.5 * (pair["difference"] == 0) for pair in pairs) / len(pairs)


# -- runs ---------------------------------------------------------------------------------------------


def train(run_dir: Path, keys: dict[str, Any]) -> None:
    """Starts launch/train.py, which resumes an interrupted run and leaves a complete one unchanged."""
    keys = {"run.dir": run_dir, "run.threads": 1, "zero": "stage0", "tracker.samples": 0, **keys}
    arguments = [f"{key}={value}" for key, value in keys.items()]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *arguments]
    subprocess.run(command, env=environment, check=True)


def sft_keys(sizes: Sizes, start: Path) -> dict[str, Any]:
    return {
        "stage": "sft",
        "run.seed": sizes.seed,
        "run.steps": sizes.sft_steps,
        "actor.model.path": start / "model",
        "actor.model.dtype": "fp32",
        "actor.optim.lr": 1e-3,
        "actor.optim.betas": "[0.9,0.98]",
        "actor.optim.schedule": "constant",
        "actor.optim.warmup_ratio": 0.2,
        "data.path": start / "train.jsonl",
        "sft.batch_size": min(256, 4 * sizes.prompts),
        "sft.learn": "answer",
    }


def reward_model_keys(sizes: Sizes, folder: Path, count: int) -> dict[str, Any]:
    return {
        "stage": "reward_model",
        "run.seed": sizes.seed,
        "run.steps": sizes.reward_model_steps,
        "scorer.model.path": folder / "sft" / "model",
        "scorer.model.dtype": "fp32",
        "scorer.optim.lr": 5e-4,
        "data.path": folder / f"pairs_{count}.jsonl",
        "data.eval_path": folder / "heldout_pairs.jsonl",
        "reward_model.batch_size": sizes.reward_model_batch,
        "reward_model.joint": "' '",  # with which the page was measured; the tokenizer has no space
    }


def ppo_keys(sizes: Sizes, folder: Path, proxy: Path) -> dict[str, Any]:
    return {
        "algo": "sums",
        "run.seed": sizes.seed,
        "run.steps": sizes.ppo_steps,
        "actor.model.path": folder / "sft" / "model",
        "actor.model.dtype": "fp32",
        "actor.optim.lr": 2e-4,
        "critic.optim.lr": 1e-3,
        "algo.kl.coef": 0,
        "algo.minibatch_size": sizes.minibatch,
        "algo.reward_shaping.clip": "null",
        "data.path": folder / "start" / "train.jsonl",
        "data.max_prompt_tokens": 32,
        "rollout.prompts_per_step": sizes.prompts,
        "sampling.max_new_tokens": 3,
        "reward": "weighted",
        "reward@reward.parts.proxy.reward": "model",
        "reward.parts.proxy.reward.model.path": proxy / "model",
        "reward.parts.proxy.reward.model.dtype": "fp32",
        "reward.parts.proxy.reward.append_eos": "false",  # the pairs have no end token
        "reward.parts.proxy.reward.audit": "off",
        "reward@reward.parts.gold.reward": "function",
        "reward.parts.gold.reward.path": f"{Path(__file__).resolve()}:gold",
        "reward.parts.gold.weight": 0,  # measured, but not part of the training reward
        "critic.init": "path",
        "critic.model.path": proxy / "model",
    }


# -- results ------------------------------------------------------------------------------------------


def accuracy(proxy: Path) -> dict[str, float]:
    """Returns the held-out accuracy of a reward model after its training."""
    lines = [line for line in read_lines(proxy / "metrics.jsonl") if "eval/accuracy" in line]
    return {"accuracy": lines[-1]["eval/accuracy"]}


def curve(ppo: Path) -> list[dict[str, float]]:
    """Returns sqrt(KL), proxy and gold reward for each step of a PPO run.

    A proxy is only defined up to a constant. It is shifted to the gold reward of the first step, at which the
    policy is the SFT model.
    """
    lines = read_lines(ppo / "metrics.jsonl")
    proxy, gold_reward = "reward/component/proxy_mean", "reward/component/gold_mean"
    shift = lines[0][gold_reward] - lines[0][proxy]
    return [
        {
            "distance": math.sqrt(max(line["kl/ref_seq_mean"], 0.0)),
            "proxy": line[proxy] + shift,
            "gold": line[gold_reward],
        }
        for line in lines
    ]


def table(studies: list[dict[str, Any]], best: float) -> list[str]:
    """Formats the results as a Markdown table."""
    lines = [
        f"held-out accuracy of the best possible reward model: {best:.1%}",
        "",
        "| pairs | held-out accuracy | gold at the start | highest | at sqrt(KL) | at the end | "
        "proxy at the end | sqrt(KL) at the end |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for study in studies:
        first, last = study["steps"][0], study["steps"][-1]
        top = max(study["steps"], key=lambda step: step["gold"])
        lines.append(
            f"| {study['pairs']} | {study['accuracy']:.1%} | {first['gold']:.2f} | {top['gold']:.2f} | "
            f"{top['distance']:.2f} | {last['gold']:.2f} | {last['proxy']:.2f} | {last['distance']:.2f} |"
        )
    return lines


def draw(studies: list[dict[str, Any]], file: Path) -> None:
    """Draws proxy (dashed) and gold reward (solid) over sqrt(KL), with one colour per number of pairs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, study in enumerate(studies):
        distance = [step["distance"] for step in study["steps"]]
        for name, style in (("gold", "-"), ("proxy", "--")):
            label = f"{name}, {study['pairs']} pairs"
            axes.plot(
                distance, [step[name] for step in study["steps"]], style, color=f"C{i}", lw=1.3, label=label
            )
    axes.set(xlabel="sqrt(KL to the SFT model), nats per response", ylabel="mean reward")
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
