"""Runs SFT, reward model, PPO and an evaluation: python launch/pipeline.py +pipeline=NAME [ARGUMENT ...]

Each stage is an ordinary run in a separate directory, outputs/NAME/STAGE, with a separate launcher. The same
command resumes a pipeline that was stopped or killed at any point. Arguments:

    KEY=VALUE, GROUP=OPTION          for every stage that has the key or uses the group
    STAGE:KEY=VALUE                  for one stage, such as ppo:algo.kl.coef=0.1
    evaluation:KEY=VALUE             for the evaluation, such as evaluation:eval.max_prompts=100
    ranks=N, STAGE:ranks=N           number of ranks; default: one for each visible GPU, or one without GPUs
    run.name=NAME, run.dir=DIR       name and directory of the pipeline; default: its name, outputs/<name>
    run.dry_run=true                 a dry run of each stage with tiny models, on results of earlier stages
    --cfg job                        prints the configs of the stages, and the arguments of the evaluation
    --config-dir DIR                 another folder of configs, with DIR/pipeline/NAME.yaml

The file conf/pipeline/NAME.yaml lists the stages and the arguments of launch/train.py for each stage. In
these arguments, ${stages.STAGE.KEY} stands for the value of a key of an earlier stage, as in
${stages.sft.run.dir}/model.

Exit code 0: done, or a stage ended early (run.stop_at_step, run.max_minutes); 2: a mistake in the arguments,
the configs or the data; 143: a signal stopped the running stage after it saved a checkpoint; 130: a second
Ctrl-C killed the stage; otherwise the exit code of the stage that failed.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import yaml

from launch.cli import find_folders, parse_options, to_yaml
from launch.composing import Folders, compose_config, resolve_config
from launch.process import complain, take_lock
from ppo_ds.commands.entry_points import with_commands
from ppo_ds.config.reading import dotted_keys, read
from ppo_ds.config.resume import OPEN_SECTIONS
from ppo_ds.config.schema import Config, PPOConfig, default_dir, inherit, resolved
from ppo_ds.config.text import did_you_mean, show
from ppo_ds.config.types import Count, Section, Text
from ppo_ds.config.validation import validated
from ppo_ds.distributed.child_groups import ChildGroups
from ppo_ds.distributed.exit import exit_now
from ppo_ds.distributed.gpus import NOT_REQUESTED, cpu_requested, nvidia_gpus
from ppo_ds.errors import UserError
from ppo_ds.storage.run_directory import dry_run_directory
from ppo_ds.tools.pipeline import Job, Pipeline, run_pipeline

EVALUATION = "evaluation"  # name of the evaluation, which no stage may have
REFERENCE = re.compile(r"\$\{stages\.([^.}]+)\.([^}]+)\}")
PREFIXED = re.compile(r"([^=:]+):(.*)", re.DOTALL)  # an argument of one stage
ACTOR = ("actor.model.path", "actor.model.revision")  # keys of the model that a stage trains
OWN_KEYS = ("ranks", "run.name", "run.dir")  # keys of the pipeline itself if they have no prefix


class StageFile(Section):
    """A stage in the file of a pipeline."""

    arguments: list[Text]
    """Arguments of launch/train.py."""

    ranks: Count | None = None
    """Number of ranks; null: one for each visible GPU, or one without GPUs."""


class EvaluationFile(Section):
    """The evaluation at the end, with the prompts, the sampling and the reward of the last stage."""

    models: dict[str, Text]
    """Names and paths of the models to compare."""

    judge: list[Text] = []
    """Arguments that choose a second reward, such as [reward=sums]; []: none."""


class PipelineFile(Section):
    """The file of a pipeline, conf/pipeline/NAME.yaml."""

    stages: dict[str, StageFile]
    """The stages, in the order in which they run."""

    evaluation: EvaluationFile | None = None
    """A comparison of models at the end; null: none."""


def main(argv: list[str]) -> int:
    try:
        options = parse_options(argv, prog="launch/pipeline.py")
        folders = find_folders(options)
        if options.help is not None:
            print(f"{with_commands(__doc__)}\nAvailable pipelines: {', '.join(folders.options('pipeline'))}")
            return 0
        pipeline = plan_pipeline(folders, options.overrides)
        if options.cfg:
            shown = {job.name: resolved(job.config) if job.config else job.arguments for job in pipeline.jobs}
            print(to_yaml(shown), end="")
            return 0
        lock = None if pipeline.dry_run else take_lock(pipeline.folder)
        groups = ChildGroups(on_stop=lock.mark_ending if lock else lambda: None)
        return run_pipeline(pipeline, groups, say=partial(print, flush=True))
    except UserError as error:
        return complain(error)


def plan_pipeline(folders: Folders, overrides: list[str]) -> Pipeline:
    """Builds the pipeline that a command line describes.

    Raises UserError with the problems of all stages. Files and folders that an earlier stage will write are
    not checked.
    """
    shared = [text for text in overrides if not PREFIXED.match(text)]
    name = take(shared, "pipeline")
    if name is None:
        raise UserError(f"+pipeline=NAME is missing; available: {', '.join(folders.options('pipeline'))}")
    file = read_file(folders, name)
    own: dict[str, list[str]] = {stage: [] for stage in (*file.stages, EVALUATION)}
    problems = []
    for text in overrides:
        if found := PREFIXED.match(text):
            if found[1] in own:
                own[found[1]].append(found[2])
            else:
                stages = f"the stages are {', '.join(own)}{did_you_mean(found[1], own)}"
                problems.append(f"{text}: no such stage; {stages}")
    if problems:
        raise UserError(*problems)
    return Planner(folders, file, shared, own, name.removesuffix(".yaml")).plan()


def read_file(folders: Folders, name: str) -> PipelineFile:
    """Reads conf/pipeline/NAME.yaml. Raises UserError with all problems in it."""
    options = folders.options("pipeline")
    files = [path / "pipeline" / f"{name.removesuffix('.yaml')}.yaml" for path in folders.paths]
    path = next(filter(os.path.isfile, files), None)
    if path is None:
        raise UserError(
            f"+pipeline={name}: no such pipeline; available: {', '.join(options)}"
            f"{did_you_mean(name, options)}"
        )
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    file, wrong = read(PipelineFile, tree or {})
    problems = [f"{path}: {line}" for line in wrong.values()]
    if not problems and not file.stages:
        problems = [f"{path}: stages={{}}: must name at least one stage"]
    problems += [
        f"{path}: stages.{stage}: must be a name of letters, digits and _, not {EVALUATION}"
        for stage in file.stages
        if stage == EVALUATION or not re.fullmatch(r"[A-Za-z]\w*", stage)
    ]
    if problems:
        raise UserError(*problems)
    return file


class Planner:
    """Composes and checks the stages of a pipeline, one after the other."""

    def __init__(
        self, folders: Folders, file: PipelineFile, shared: list[str], own: dict[str, list[str]], name: str
    ):
        self.folders, self.file, self.own = folders, file, own
        self.name = take(shared, "run.name") or name
        self.folder = Path(take(shared, "run.dir") or default_dir(self.name)).expanduser()
        self.shared_ranks = take(shared, "ranks")
        self.shared = shared  # arguments that apply to every stage with the key
        self.unused = dict.fromkeys(shared)  # shared arguments that have applied to no stage so far
        self.problems: list[str] = []
        self.jobs: list[Job] = []
        self.settings: dict[str, dict[str, Any]] = {}  # the resolved config of each stage so far

    def plan(self) -> Pipeline:
        for name in self.file.stages:
            self.add_stage(name)
        keys = [*OWN_KEYS, *dotted_keys(Config)]
        for argument in self.unused:
            hint = did_you_mean(key_of(argument), keys)
            self.problems.append(f"{argument}: no stage of this pipeline has such a key{hint}")
        dry_runs = {bool(settings["run"]["dry_run"]) for settings in self.settings.values()}
        if len(dry_runs) > 1:
            self.problems.append(
                "run.dry_run=true: is for all stages of a pipeline; remove the stage before it"
            )
        if self.file.evaluation is not None and dry_runs == {False} and not self.problems:
            self.add_evaluation(self.file.evaluation)
        if self.problems:
            raise UserError(*dict.fromkeys(self.problems))
        return Pipeline(self.name, self.folder, self.jobs, dry_runs == {True})

    def add_stage(self, name: str) -> None:
        ranks = self.ranks(name, self.file.stages[name].ranks)
        placed = [f"run.name={self.name}_{name}", f"run.dir={self.folder / name}"]
        fixed = self.substituted(self.file.stages[name].arguments, f"stages.{name}")
        before, _ = self.compose([*placed, *fixed], ranks)
        shared = [argument for argument in self.shared if self.applies(argument, before)]
        for argument in shared:
            self.unused.pop(argument, None)
        own = [*shared, *self.substituted(self.own[name], name)]
        if "reward" in map(key_of, own):  # another reward would reject the keys of the file's reward
            fixed = [argument for argument in fixed if key_of(argument).split(".")[0] != "reward"]
        arguments = [*placed, *fixed, *own]
        config, problems = self.compose(arguments, ranks)
        self.problems += [f"{name}: {line}" for line in problems]
        if config.run.dry_run:
            arguments.append("run.dry_run=keep")
        self.settings[name] = resolved(config)
        self.jobs.append(Job(name, HERE / "train.py", arguments, ranks, config))

    def add_evaluation(self, file: EvaluationFile) -> None:
        """Adds the job that compares models by the last stage's reward and, if set, by ``file.judge``."""
        last = self.jobs[-1]
        if not isinstance(last.config, PPOConfig):
            raise UserError(f"{EVALUATION}: the stage before it, {last.name}, must have stage=ppo")
        if last.config.data.eval_path is None:
            raise UserError(f"{last.name}:data.eval_path is missing: the evaluation needs held-out prompts")
        ranks = self.ranks(EVALUATION, last.ranks)
        paths = self.substituted(list(file.models.values()), f"{EVALUATION}.models")
        judge = [re.sub(r"^reward\.", "eval.rewards.judge.", text) for text in file.judge]
        judge = [re.sub("^reward=", "+reward@eval.rewards.judge=", text) for text in judge]
        own = [*self.substituted(self.own[EVALUATION], EVALUATION), *judge]
        _, problems = self.compose([*last.arguments, *own], ranks)
        self.problems += [f"{EVALUATION}: {line}" for line in problems]
        # the command compares the models in its arguments, not the actor of the stage
        kept = [text for text in last.arguments if key_of(text) not in ACTOR]
        options = ["--out", str(self.folder), "--names", ",".join(file.models)]
        self.jobs.append(Job(EVALUATION, HERE / "evaluate.py", [*options, *paths, *kept, *own], ranks))

    def compose(self, arguments: list[str], ranks: int) -> tuple[Config, list[str]]:
        """Composes a config; returns it, with valid values in place of invalid ones, and its problems.

        Problems with files that an earlier stage will write are left out.
        """
        composed, problems = compose_config(self.folders, "config", arguments)
        tree = resolve_config(composed)
        try:
            return validated(tree, ranks), problems
        except UserError as error:
            problems += [line for line in error.problems if not self.is_awaited(line)]
            return inherit(read(Config, tree)[0]), problems

    def is_awaited(self, problem: str) -> bool:
        """Returns whether a problem is that a file in the run directory of an earlier stage is missing."""
        folders = [settings["run"]["dir"] for settings in self.settings.values()]
        folders += [str(dry_run_directory(folder)) for folder in folders]
        missing = re.search(r": no such (?:file|folder)(?:; did you mean .*\?)?$", problem)
        return missing is not None and any(f"={folder}/" in problem for folder in folders)

    def substituted(self, arguments: list[str], where: str) -> list[str]:
        """Replaces references such as ${stages.sft.run.dir} by the values of keys of earlier stages."""
        texts = []
        for argument in arguments:
            try:
                texts.append(REFERENCE.sub(self.value_of, argument))
            except KeyError as error:
                self.problems.append(f"{where}: {argument}: {error.args[0]}")
        return texts

    def value_of(self, reference: re.Match[str]) -> str:
        """Returns the value of a reference; raises KeyError with the reason if there is none."""
        stage, key = reference.groups()
        if stage not in self.settings:
            raise KeyError(f"no earlier stage is named {stage}{did_you_mean(stage, self.settings)}")
        settings, value = self.settings[stage], self.settings[stage]
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                keys = dotted_keys(Config.variant_of(settings))
                raise KeyError(f"stage {stage} has no key {key}{did_you_mean(key, keys)}")
            value = value[part]
        run_dir = settings["run"]["dir"]
        if settings["run"]["dry_run"] and (value == run_dir or str(value).startswith(f"{run_dir}/")):
            return f"{dry_run_directory(run_dir)}{str(value).removeprefix(run_dir)}"
        return value if isinstance(value, str) else show(value)

    def applies(self, argument: str, config: Config) -> bool:
        """Returns whether an argument without a prefix STAGE: applies to a stage with this config.

        A key applies if the stage has it. A group with a package, such as model@actor.model, applies if the
        stage has the section of the package, here actor. A group without a package applies if the stage has
        the section of the same name, or if there is no such section in any stage, as for zero.
        """
        key, sections = key_of(argument), type(config).model_fields
        group, _, package = key.partition("@")
        if group in self.folders.groups():
            section = package.split(".")[0] if package else group
            return group != "experiment" and (section in sections or section not in Config.all_fields())
        if key.split(".")[0] not in sections or (key.startswith("prepare.") and config.prepare is None):
            return False
        is_open = any(key.startswith(f"{section}.") for section in OPEN_SECTIONS)
        return is_open or key in dotted_keys(type(config))

    def ranks(self, name: str, of_file: int | None) -> int:
        text = take(self.own[name], "ranks") or self.shared_ranks
        if text is None:
            return of_file or visible_gpus() or 1
        if not text.isdecimal() or int(text) < 1:
            self.problems.append(f"ranks={text}: must be a whole number of at least 1")
            return 1
        return int(text)


def take(arguments: list[str], key: str) -> str | None:
    """Removes an argument KEY=VALUE from a list and returns VALUE, or None if there is no such argument."""
    found = None
    for argument in [text for text in arguments if key_of(text) == key]:
        arguments.remove(argument)
        found = argument.partition("=")[2]
    return found


def key_of(argument: str) -> str:
    """Returns KEY of an argument KEY=VALUE, or GROUP or GROUP@PACKAGE of one for a group, without + and ~."""
    return argument.partition("=")[0].lstrip("+~")


def visible_gpus() -> int:
    """Returns the number of NVIDIA GPUs that runs may use, without importing torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cpu_requested(os.environ) or chosen == NOT_REQUESTED:
        return 0
    if chosen is not None:
        return len([device for device in chosen.split(",") if device.strip()])
    return nvidia_gpus()


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
