"""Reads a pipeline's file and command line, and checks the configs of all of its stages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from launch.composing import Folders, compose_config, resolve_config
from ppo_ds.config.reading import dotted_keys, read
from ppo_ds.config.resume import OPEN_SECTIONS
from ppo_ds.config.schema import Config, PPOConfig, default_dir, from_tree, inherit, resolved
from ppo_ds.config.text import did_you_mean, show
from ppo_ds.config.types import Count, Section, Text
from ppo_ds.config.validation import validated
from ppo_ds.distributed.gpus import NOT_REQUESTED, cpu_requested, nvidia_gpus
from ppo_ds.errors import UserError
from ppo_ds.storage.run_directory import dry_run_directory
from ppo_ds.tools.pipeline import SETTINGS, Job, Pipeline

EVALUATION = "evaluation"  # name of the evaluation, which no stage may have
HERE = Path(__file__).resolve().parent
REFERENCE = re.compile(r"\$\{stages\.([^.}]+)\.([^}]+)\}")
OWN_KEYS = ("ranks", "run.name", "run.dir")  # keys of the pipeline itself if they have no prefix
# sections of a config that the evaluation reads, and the keys of `run` that it reads
EVALUATION_SECTIONS = ("actor", "data", "eval", "memory", "reward", "rollout", "sampling")
EVALUATION_KEYS = ("run.seed", "run.threads", "run.timeout_minutes", "run.verbose")
Settings = dict[str, Any]


class StageFile(Section):
    """A stage in the file of a pipeline."""

    arguments: list[Text] = Field(description="Arguments of launch/train.py.")
    ranks: Count | None = Field(
        None, description="Number of ranks; null: one for each visible GPU, or one without GPUs."
    )


class EvaluationFile(Section):
    """The evaluation at the end of a pipeline."""

    models: dict[str, Text] = Field(description="Names and paths of the models to compare.")
    like: Text | None = Field(
        None, description="The stage whose prompts, sampling and reward are used; null: the last one."
    )
    judge: list[Text] = Field(
        [], description="Arguments that choose a second reward, such as [reward=sums]; []: none."
    )
    arguments: list[Text] = Field([], description="More arguments of launch/train.py.")
    ranks: Count | None = Field(None, description="Number of ranks; null: as the stage.")


class PipelineFile(Section):
    """The file of a pipeline, conf/pipeline/NAME.yaml."""

    stages: dict[str, StageFile] = Field(description="The stages, in the order in which they run.")
    evaluation: EvaluationFile | None = Field(
        None, description="A comparison of models at the end; null: none."
    )


@dataclass
class Arguments:
    """The arguments of the command line, grouped by the part of the pipeline that they apply to."""

    pipeline: dict[str, str] = field(default_factory=dict)  # values of OWN_KEYS and of "pipeline"
    shared: list[str] = field(default_factory=list)  # apply to every stage with the key
    own: dict[str, list[str]] = field(default_factory=dict)  # by stage
    ranks: dict[str, str] = field(default_factory=dict)  # by stage


def plan_pipeline(folders: Folders, overrides: list[str]) -> tuple[Pipeline, Settings | None]:
    """Builds the pipeline that a command line describes, and the settings of its evaluation, if it has one.

    Raises UserError with the problems of all stages. Files and folders that an earlier stage will write are
    not checked.
    """
    given = parse_arguments(overrides)
    name = given.pipeline.get("pipeline")
    if name is None:
        raise UserError(f"+pipeline=NAME is missing; available: {', '.join(folders.options('pipeline'))}")
    file = read_file(folders, name)
    stages = [*file.stages, EVALUATION]
    unknown = [
        f"{stage}:{argument}: no such stage; the stages are {', '.join(stages)}{did_you_mean(stage, stages)}"
        for stage, arguments in given.own.items()
        for argument in arguments
        if stage not in stages
    ]
    if unknown:
        raise UserError(*unknown)
    return Planner(folders, file, given, name).plan()


def parse_arguments(overrides: Iterable[str]) -> Arguments:
    """Groups the arguments by prefix. An argument without a prefix applies to all stages with its key."""
    given = Arguments()
    for text in overrides:
        prefix = re.match(r"([^=:]+):(?=[^:]*)(.*)", text, re.DOTALL)
        stage, argument = (prefix[1], prefix[2]) if prefix else (None, text)
        key, _, value = argument.partition("=")
        if stage is not None and key == "ranks":
            given.ranks[stage] = value
            given.own.setdefault(stage, [])
        elif stage is not None:
            given.own.setdefault(stage, []).append(argument)
        elif key.lstrip("+") == "pipeline":
            given.pipeline["pipeline"] = value
        elif key in OWN_KEYS:
            given.pipeline[key] = value
        else:
            given.shared.append(argument)
    return given


def read_file(folders: Folders, name: str) -> PipelineFile:
    """Reads conf/pipeline/NAME.yaml. Raises UserError with all problems in it."""
    options = folders.options("pipeline")
    files = [path / "pipeline" / f"{name.removesuffix('.yaml')}.yaml" for path in folders.paths]
    path = next((file for file in files if file.is_file()), None)
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
    for stage in file.stages:
        if stage == EVALUATION or not re.fullmatch(r"[A-Za-z]\w*", stage):
            problems.append(
                f"{path}: stages.{stage}: must be a name of letters, digits and _, not {EVALUATION}"
            )
    if problems:
        raise UserError(*problems)
    return file


class Planner:
    """Composes and checks the stages of a pipeline, one after the other."""

    def __init__(self, folders: Folders, file: PipelineFile, given: Arguments, name: str):
        self.folders, self.file, self.given = folders, file, given
        self.name = given.pipeline.get("run.name", name.removesuffix(".yaml"))
        self.folder = Path(given.pipeline.get("run.dir", default_dir(self.name))).expanduser()
        self.problems: list[str] = []
        self.jobs: list[Job] = []
        self.settings: dict[str, Settings] = {}  # the resolved config of each stage so far
        self.applied: set[str] = set()  # shared arguments that apply to at least one stage
        self.known = dict.fromkeys(OWN_KEYS)  # keys of at least one stage, for suggestions

    def plan(self) -> tuple[Pipeline, Settings | None]:
        for name in self.file.stages:
            self.add_stage(name)
        for argument in self.given.shared:
            if argument not in self.applied:
                key = key_of(argument)
                self.problems.append(
                    f"{argument}: no stage of this pipeline has such a key{did_you_mean(key, self.known)}"
                )
        if self.problems:  # those of the evaluation would mostly repeat them
            raise UserError(*dict.fromkeys(self.problems))
        dry_runs = {bool(settings["run"]["dry_run"]) for settings in self.settings.values()}
        if len(dry_runs) > 1:
            raise UserError("run.dry_run=true: is for all stages of a pipeline; remove the stage before it")
        dry_run = dry_runs == {True}
        job, settings = None, None
        if self.file.evaluation is not None and not dry_run:
            job, settings = self.evaluation(self.file.evaluation)
        if self.problems:
            raise UserError(*dict.fromkeys(self.problems))
        return Pipeline(self.name, self.folder, self.jobs, job, dry_run), settings

    def add_stage(self, name: str) -> None:
        """Composes and checks the config of a stage, and adds its job."""
        ranks = self.ranks(name, self.file.stages[name].ranks)
        placed = [f"run.name={self.name}_{name}", f"run.dir={self.folder / name}"]
        fixed, inputs = self.substituted(self.file.stages[name].arguments, f"stages.{name}")
        own, more_inputs = self.substituted(self.given.own.get(name, []), name)
        before, _ = self.compose([*placed, *fixed], ranks)
        shared = [argument for argument in self.given.shared if self.knows(before, argument)]
        self.applied |= set(shared)
        if "reward" in map(key_of, [*shared, *own]):
            fixed = without_reward(fixed)
        arguments = [*placed, *fixed, *shared, *own]
        config, problems = self.compose(arguments, ranks)
        self.problems += [f"{name}: {line}" for line in problems]
        run = config.run
        if Path(str(run.dir)) in {self.folder, *(Path(s["run"]["dir"]) for s in self.settings.values())}:
            self.problems.append(
                f"{name}:run.dir={run.dir}: is the directory of the pipeline or of another stage; remove it"
            )
        if run.resume == "restart" and "run.resume=restart" in shared:
            self.problems.append(
                "run.resume=restart: would begin every stage anew at each start; choose another run.name, "
                f"or begin one stage anew, such as {name}:run.resume=restart"
            )
        if run.dry_run:
            arguments.append("run.dry_run=keep")
        self.settings[name] = resolved(config)
        given = set(map(key_of, arguments))
        inputs = {key: path for key, path in (inputs | more_inputs).items() if key in given}
        self.jobs.append(Job(name, HERE / "train.py", arguments, ranks, inputs, config))

    def evaluation(self, file: EvaluationFile) -> tuple[Job, Settings]:
        """Returns the job that compares models, and the settings that it reads from a file."""
        name = file.like or self.jobs[-1].name
        like = next((job for job in self.jobs if job.name == name), None)
        if like is None:
            raise UserError(f"evaluation.like={name}: no such stage{did_you_mean(name, self.settings)}")
        self.problems += [
            f"{EVALUATION}:{argument}: the evaluation does not use this key; it reads "
            f"{', '.join(EVALUATION_SECTIONS)}, {', '.join(EVALUATION_KEYS)}"
            for argument in self.given.own.get(EVALUATION, [])
            if (key := key_of(argument)) not in EVALUATION_KEYS
            and key.partition(".")[0] not in EVALUATION_SECTIONS
        ]
        ranks = self.ranks(EVALUATION, file.ranks or like.ranks)
        own, inputs = self.substituted([*file.arguments, *self.given.own.get(EVALUATION, [])], EVALUATION)
        judge, more_inputs = self.substituted(file.judge, f"{EVALUATION}.judge")
        models, model_inputs = self.substituted(
            [f"{name}={path}" for name, path in file.models.items()], f"{EVALUATION}.models"
        )
        config, problems = self.compose([*like.arguments, *own], like.ranks)
        if not isinstance(config, PPOConfig):
            raise UserError(f"{EVALUATION}.like={name}: must be a stage with stage=ppo, whose reward is used")
        if config.data.eval_path is None:
            self.problems.append(f"{name}:data.eval_path is missing: the evaluation needs held-out prompts")
        rewards = {"reward": config.reward}
        if judge:
            second, more = self.compose([*without_reward([*like.arguments, *own]), *judge], like.ranks)
            problems += more
            rewards["judge"] = second.reward if isinstance(second, PPOConfig) else {}
        self.problems += [f"{EVALUATION}: {line}" for line in dict.fromkeys(problems)]
        settings = {
            "config": resolved(config),
            "models": dict(model.split("=", 1) for model in models),
            "rewards": rewards,
        }
        path = self.folder / SETTINGS
        inputs = like.inputs | inputs | more_inputs | {"settings": path}
        inputs |= {f"models.{name}": model for name, model in model_inputs.items()}
        return Job(EVALUATION, HERE / "evaluate.py", ["--settings", str(path)], ranks, inputs), settings

    def compose(self, arguments: list[str], ranks: int) -> tuple[Config, list[str]]:
        """Composes a config and returns it with its problems; invalid values are replaced by valid ones.

        Problems with files that an earlier stage will write are left out.
        """
        composed, problems = compose_config(self.folders, "config", arguments)
        tree = resolve_config(composed)
        try:
            return validated(tree, ranks), problems
        except UserError as error:
            missing = [line for line in error.problems if self.is_awaited(line)]
            problems += [line for line in error.problems if line not in missing]
            return inherit(from_tree(tree)[0]), problems

    def is_awaited(self, problem: str) -> bool:
        """Returns whether a problem is that a file in the run directory of an earlier stage is missing."""
        folders = [settings["run"]["dir"] for settings in self.settings.values()]
        folders += [str(dry_run_directory(folder)) for folder in folders]
        missing = re.search(r": no such (?:file|folder)(?:; did you mean .*\?)?$", problem)
        return missing is not None and any(f"={folder}/" in problem for folder in folders)

    def substituted(self, arguments: list[str], where: str) -> tuple[list[str], dict[str, Path]]:
        """Replaces references such as ${stages.sft.run.dir} by the values of the keys that they name.

        Also returns the arguments that name a path in the run directory of an earlier stage: key -> path.
        """
        texts, inputs = [], {}
        for argument in arguments:
            try:
                text = REFERENCE.sub(self.value_of, argument)
            except KeyError as error:
                self.problems.append(f"{where}: {argument}: {error.args[0]}")
                continue
            texts.append(text)
            if any(match[2] == "run.dir" for match in REFERENCE.finditer(argument)):
                inputs[key_of(argument)] = Path(text.partition("=")[2])
        return texts, inputs

    def value_of(self, reference: re.Match[str]) -> str:
        """Returns the value that a reference stands for; raises KeyError with the reason if there is none."""
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

    def knows(self, config: Config, argument: str) -> bool:
        """Returns whether an argument without a prefix applies to a stage with this config.

        A group applies to the stages that have its section: the section of its package (model@actor.model:
        actor), otherwise the section with its name. A group without a section, such as zero, applies to all
        stages.
        """
        key, sections = key_of(argument), type(config).model_fields
        group, _, package = key.partition("@")
        if group in self.folders.groups():
            if group == "experiment":
                return False
            section = package.split(".")[0] if package else group
            return section in sections or section not in Config.all_fields()
        keys = dotted_keys(type(config))
        self.known |= dict.fromkeys(keys)
        if key.split(".")[0] not in sections:
            return False
        is_open = any(key.startswith(f"{section}.") for section in OPEN_SECTIONS)
        if key.startswith("prepare.") and config.prepare is None:
            return False
        return key in keys or is_open

    def ranks(self, name: str, of_file: int | None) -> int:
        """Returns the number of ranks of a stage."""
        text = self.given.ranks.get(name, self.given.pipeline.get("ranks"))
        if text is None:
            return of_file or visible_gpus() or 1
        if not text.isdigit() or int(text) < 1:
            own = f"{name}:" if name in self.given.ranks else ""
            self.problems.append(f"{own}ranks={text}: must be a whole number of at least 1")
            return 1
        return int(text)


def key_of(argument: str) -> str:
    """Returns the key or group of an argument, package included, without leading signs and value."""
    return argument.partition("=")[0].lstrip("+~")


def without_reward(arguments: list[str]) -> list[str]:
    """Returns the arguments without those of the reward, because another reward would refuse its keys."""
    return [argument for argument in arguments if key_of(argument).split(".")[0] != "reward"]


def visible_gpus() -> int:
    """Returns the number of NVIDIA GPUs that runs may use, without importing torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cpu_requested(os.environ) or chosen == NOT_REQUESTED:
        return 0
    if chosen is not None:
        return len([device for device in chosen.split(",") if device.strip()])
    return nvidia_gpus()
