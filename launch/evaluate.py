"""Compares models on the same prompts: python launch/evaluate.py MODEL [MODEL ...] [KEY=VALUE ...]

    python launch/evaluate.py outputs/base outputs/tuned data.path=prompts.jsonl reward=function \\
        reward.path=score.py:score

MODEL is a run directory, a model folder, a folder with a LoRA adapter, or a Hub name; all models are compared
with the first one. The other arguments are those of launch/train.py; only data.*, sampling.*, reward.*,
eval.*, memory.*, rollout.backend, actor.model.* (dtype, trust_remote_code, ...) and run.seed have an effect.
As in training, +reward@eval.rewards.NAME=GROUP and eval.rewards.NAME.KEY=VALUE add rewards. The prompts are
those of data.eval_path if it is set, else of data.path. sampling.max_new_tokens is 512 unless it is set.
Options:

    --samples N           N sampled responses to each prompt, and pass@k; default: one greedy response
    --by COLUMN           scores also for each value of a column of the data, as eval.by=COLUMN
    --judge FILE.py:fn    a function that judges pairs of responses, besides the reward or instead of it
    --out DIR             where to write evaluation.json, .jsonl and .html; default: outputs/evaluation
    --names A,B,...       names of the models in the results; default: the last parts of their paths

deepspeed, torchrun and plain python can start the program, with the same results for any number of ranks.
docs/evaluation.md describes the results.

Exit code 0: done; 2: the arguments, the config, the data, a model folder or a result of a reward or the judge
is wrong; 130: interrupted; 1: any other error.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser, compose_for_models, parse_options, split_models, to_yaml, used_paths
from launch.hub import use_caches_without_the_hub
from launch.process import complain, prepare_environment, refuse, report, run_main, write_line
from ppo_ds.commands.entry_points import command, with_commands
from ppo_ds.config.checks.data import hub_names, looks_local
from ppo_ds.config.schema import PPOConfig, resolved
from ppo_ds.errors import RunError, UserError, printable
from ppo_ds.storage.drafts import write_file
from ppo_ds.tools.comparison import table
from ppo_ds.tools.model_argument import NamedModel, find_models
from ppo_ds.tools.pipeline import RESULT

if TYPE_CHECKING:
    from ppo_ds.distributed.watchdog import Watchdog
    from ppo_ds.distributed.world import World
    from ppo_ds.tools.evaluate import Comparison


@dataclass(frozen=True)
class Evaluation:
    """The evaluation that a command line describes."""

    config: PPOConfig
    models: list[NamedModel]
    rewards: dict[str, Any]  # name -> section
    out: Path
    samples: int | None = None
    judge: str | None = None


def main(argv: list[str]) -> int:
    try:
        wanted = parse(argv)
        create_folder(wanted.out)
        prepare_environment(wanted.config.run.verbose, trains=True)
        paths = [model.path for model in wanted.models if not looks_local(model.path)]
        use_caches_without_the_hub([*paths, *hub_names(wanted.config)])
    except UserError as error:
        return complain(error)
    # slow: imports torch
    from ppo_ds.distributed.watchdog import Watchdog

    watch = Watchdog()
    try:
        world = run_evaluation(wanted, watch)
        world.barrier()  # the watchdog must watch until all ranks are done
        watch.stop()
        world.close()
    except (UserError, RunError) as error:
        return refuse(error, watch)
    except BaseException as error:  # including KeyboardInterrupt and sys.exit() in user code
        return report(error, watch, None)
    return 0


def run_evaluation(wanted: Evaluation, watch: Watchdog | None = None) -> World:
    """Connects the ranks, evaluates and writes the results. If a rank fails, the watchdog ends all ranks."""
    # slow: imports deepspeed
    from ppo_ds.distributed.store import RankStore
    from ppo_ds.distributed.world import connect, seed_everything
    from ppo_ds.tools.evaluate import evaluate
    from ppo_ds.tools.pairwise_judge import PairwiseJudge

    judge = PairwiseJudge(wanted.judge) if wanted.judge else None
    run = wanted.config.run
    world = connect(run.timeout_minutes, run.verbose, run.threads)
    if watch is not None:
        watch.start(world, RankStore())
    seed_everything(run.seed)
    result = evaluate(
        wanted.config,
        world,
        wanted.models,
        wanted.rewards,
        samples=wanted.samples,
        judge=judge,
        note=write_line if world.is_main else lambda line: None,
    )
    if world.is_main:
        write_results(wanted, result)
    return world


def write_results(wanted: Evaluation, result: Comparison) -> None:
    from ppo_ds.tracking.html.comparison import comparison_page  # imports torch

    paths = {model.name: str(model.adapter or model.path) for model in wanted.models}
    summary = {"models": paths, **result.summary, "tokens_per_second": result.tokens_per_second}
    lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in result.rows)
    write_file(wanted.out / "evaluation.jsonl", lines)
    write_file(wanted.out / "evaluation.html", comparison_page(summary, result.rows))
    write_file(wanted.out / RESULT, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    print("\n".join(map(printable, table(summary).split("\n"))))
    print(f"\nside by side: {wanted.out / 'evaluation.html'}", flush=True)


def parse(argv: list[str]) -> Evaluation:
    """Reads the command line. Raises UserError, and SystemExit(0) after --help or --cfg."""
    parser = Parser(prog="launch/evaluate.py", add_help=False)
    parser.add_argument("--names")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--by")
    parser.add_argument("--judge")
    parser.add_argument("--out", type=Path, default=Path("outputs", "evaluation"))
    options = parse_options(argv, prog="launch/evaluate.py", parents=[parser])
    is_main = os.environ.get("RANK", "0") == "0"
    if options.help is not None:
        print(with_commands(__doc__) if is_main else "", end="")
        raise SystemExit(0)
    if options.samples is not None and options.samples < 1:
        raise UserError(f"--samples={options.samples}: must be at least 1")
    if options.out.is_file():
        raise UserError(f"--out={options.out}: is a file; give a folder for the results")
    arguments, overrides, base = split_models(options.overrides)
    overrides += [] if options.by is None else [f"eval.by={options.by}"]
    if not arguments:
        raise UserError(
            f"MODEL is missing: give one or more models to compare, such as {command('evaluate')} "
            "outputs/base outputs/tuned data.path=... reward=...; see --help"
        )
    models = find_models(arguments, base)
    if options.names is not None:
        names = options.names.split(",")
        if len({*names}) != len(models):
            raise UserError(f"--names={options.names}: must be {len(models)} different names, one per model")
        models = [replace(model, name=name) for model, name in zip(models, names, strict=True)]
    if options.judge is not None and len(models) == 1:
        raise UserError(
            f"--judge={options.judge}: compares two models; give another MODEL, or remove --judge"
        )
    if base is not None and base not in used_paths(models) and not any(model.adapter for model in models):
        raise UserError(
            f"actor.model.path={base}: is not evaluated, since it only names the base model of adapters; "
            f"give {base} as a MODEL, without actor.model.path="
        )
    config, has_reward = compose_for_models(
        options, overrides, models, options.out, options.judge is not None
    )
    if base is None and config.actor.model.trust_remote_code and any(model.adapter for model in models):
        raise UserError(
            "actor.model.trust_remote_code=true: does not hold for the base model that an adapter names; "
            "read its code, then give it as actor.model.path=MODEL"
        )
    rewards = ({"reward": config.reward} if has_reward else {}) | config.eval.rewards
    if options.cfg:
        print(to_yaml(resolved(config)) if is_main else "", end="")
        raise SystemExit(0)
    samples = options.samples or (None if config.eval.greedy else 1)
    return Evaluation(config, models, rewards, options.out, samples, options.judge)


def create_folder(out: Path) -> None:
    """Creates the folder of the results; raises UserError if it is not writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()
    except OSError as error:
        raise UserError(
            f"--out={out}: cannot be written ({error.strerror}); give another folder for the results"
        ) from error


if __name__ == "__main__":
    run_main(main)
