"""Tests how a pipeline's file and command line become the configs and commands of its stages."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from launch.cli import CONF
from launch.composing import Folders
from launch.pipeline import plan_pipeline, visible_gpus
from ppo_ds.errors import UserError
from ppo_ds.tools.pipeline import Job, Pipeline
from tests.config.commands import MINIMAL, model_folder, problems

FILE = f"""
stages:
  first:
    arguments: {[*MINIMAL, "data.path=DATA"]}
  second:
    ranks: 2
    arguments:
      - {" ".join(MINIMAL[1:2])}
      - reward.path=pkg.mod:score
      - actor.model.path=${{stages.first.run.dir}}/model
      - actor.model.revision=${{stages.first.actor.model.revision}}
      - data.path=${{stages.first.run.dir}}/rows.jsonl
      - data.eval_path=${{stages.first.data.path}}
      - rollout.prompts_per_step=16
      - sampling.max_new_tokens=8
      - run.steps=2
      - ~algo.ptx
evaluation:
  models: {{base: "${{stages.first.actor.model.path}}", second: "${{stages.second.run.dir}}/model"}}
  judge: [reward=length, reward.longest=3]
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "prompts.jsonl").write_text("")
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    text = FILE.replace("DATA", str(tmp_path / "prompts.jsonl")).replace("      - ~algo.ptx\n", "")
    (tmp_path / "conf" / "pipeline" / "two.yaml").write_text(text)
    return Folders((CONF, tmp_path / "conf"))


def plan(folders: Folders, *arguments: str) -> Pipeline:
    return plan_pipeline(folders, ["+pipeline=two", *arguments])


def complaints(folders: Folders, *arguments: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        plan(folders, *arguments)
    return caught.value.problems


def stages(folders: Folders, *arguments: str) -> tuple[Job, Job]:
    first, second = plan(folders, *arguments).jobs[:2]
    assert first.config is not None and second.config is not None
    return first, second


def test_stages_get_directories_ranks_and_the_results_of_earlier_stages(folders: Folders) -> None:
    pipeline = plan(folders)
    first, second, evaluation = pipeline.jobs
    assert (pipeline.name, str(pipeline.folder)) == ("two", "outputs/two")
    assert [first.config.run.dir, second.config.run.dir] == ["outputs/two/first", "outputs/two/second"]
    assert [first.config.run.name, second.config.run.name] == ["two_first", "two_second"]
    assert (first.ranks, second.ranks) == (1, 2)
    assert second.config.actor.model.path == second.config.reference.model.path == "outputs/two/first/model"
    assert second.config.actor.model.revision is None
    assert second.config.data.eval_path == first.config.data.path  # any key of an earlier stage
    models = ["org/actor", "outputs/two/second/model"]
    assert evaluation.arguments[:6] == ["--out", "outputs/two", "--names", "base,second", *models]
    assert "actor.model.path=outputs/two/first/model" not in evaluation.arguments
    judge = ["+reward@eval.rewards.judge=length", "eval.rewards.judge.longest=3"]
    assert evaluation.arguments[-2:] == judge and "reward.path=pkg.mod:score" in evaluation.arguments
    assert evaluation.ranks == 2


def test_commands_of_one_and_of_several_ranks(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):  # other tests of the process may have set them
        monkeypatch.delenv(name, raising=False)
    first, second = stages(folders)
    assert first.command(29500)[1:4] == [str(first.script), "run.name=two_first", "run.dir=outputs/two/first"]
    command = second.command(29500)
    assert Path(command[0]).name == "deepspeed" and command[1:4] == ["-q", "--num_gpus", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,8")
    assert second.command(29500)[2:4] == ["--include", "localhost:3,5"]
    assert visible_gpus() == 4 and stages(folders)[0].ranks == 4
    assert [job.ranks for job in stages(folders, "ranks=8", "second:ranks=1")] == [8, 1]


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-x)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-y)'\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert visible_gpus() == 2
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")  # read for AMD GPUs only
    assert visible_gpus() == 1
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert visible_gpus() == 0


def test_arguments_reach_all_stages_or_one(folders: Folders) -> None:
    first, second = stages(
        folders, "run.seed=5", "second:run.seed=6", "zero=stage1", "first:algo.kl.coef=0.3"
    )
    assert [job.config.run.seed for job in (first, second)] == [5, 6]
    assert [job.config.actor.zero.stage for job in (first, second)] == [1, 1]
    assert [job.config.algo.kl.coef for job in (first, second)] == [0.3, 0.05]
    assert plan(folders, "evaluation:eval.max_prompts=7").jobs[2].arguments[-3] == "eval.max_prompts=7"
    assert plan(folders, "evaluation:ranks=1").jobs[2].ranks == 1


def test_a_key_reaches_only_stages_that_know_it(folders: Folders, tmp_path: Path) -> None:
    file = tmp_path / "conf" / "pipeline" / "mixed.yaml"
    file.write_text(
        f"stages:\n  sft:\n    arguments: [+experiment=sft, data.path={tmp_path}/prompts.jsonl]\n"
        f"  ppo:\n    arguments: {[*MINIMAL]}\n"
    )
    given = ["algo.kl.coef=0.3", "algo=grpo", "sft.max_tokens=99", "actor.optim.lr=1e-3", "reward=length",
             "reward.longest=4", "rollout.samples_per_prompt=2",
             "data.max_prompt_tokens=77", "zero=stage3"]  # fmt: skip
    sft, ppo = (job.config for job in plan_pipeline(folders, ["+pipeline=mixed", *given]).jobs)
    assert (sft.stage, sft.sft.max_tokens, sft.actor.optim.lr) == ("sft", 99, 1e-3)
    assert (ppo.algo.kl.coef, ppo.actor.optim.lr, ppo.reward["longest"]) == (0.3, 1e-3, 4)
    assert ppo.algo.advantage.estimator == "grpo" and "path" not in ppo.reward
    assert ppo.data.max_prompt_tokens == 77  # which sft does not use
    assert sft.actor.zero.stage == ppo.actor.zero.stage == 3


def test_unknown_keys_stages_and_references_are_refused_together_with_a_suggestion(folders: Folders) -> None:
    assert complaints(folders, "algo.epoch=2", "rank=3", "second:algo.kl.coeff=3", "~data.shufle") == [
        "second: algo.kl.coeff=3: no such key; did you mean algo.kl.coef?",
        "algo.epoch=2: no stage of this pipeline has such a key; did you mean algo.epochs?",
        "rank=3: no stage of this pipeline has such a key; did you mean ranks?",
        "~data.shufle: no stage of this pipeline has such a key; did you mean data.shuffle?",
    ]
    assert complaints(folders, "secnd:run.seed=1") == [
        "secnd:run.seed=1: no such stage; the stages are first, second, evaluation; did you mean second?"
    ]
    assert complaints(folders, "second:actor.model.path=${stages.frist.run.dir}/model") == [
        "second: actor.model.path=${stages.frist.run.dir}/model: no earlier stage is named frist; "
        "did you mean first?"
    ]
    assert complaints(folders, "second:actor.model.path=${stages.first.run.dirr}/model") == [
        "second: actor.model.path=${stages.first.run.dirr}/model: stage first has no key run.dirr; "
        "did you mean run.dir?"
    ]
    assert complaints(folders, "ranks=two") == ["ranks=two: must be a whole number of at least 1"]
    assert complaints(folders, "+experiment=rlhf")[0].startswith(
        "+experiment=rlhf: no stage of this pipeline"
    )


def test_all_stages_are_checked_except_for_files_that_are_yet_to_come(folders: Folders) -> None:
    lines = complaints(
        folders, "first:rollout.prompts_per_step=15", "second:reference.model.path=/nowhere/x",
        "second:algo.minibatch_size=5", "first:algo.minibatch_size=8",
    )  # fmt: skip
    assert [line.split(":")[0] for line in lines] == ["first", "second", "second"]
    assert "second: reference.model.path=/nowhere/x: no such folder" in lines


def test_a_stage_has_its_own_directory(folders: Folders, tmp_path: Path) -> None:
    done = model_folder(tmp_path / "elsewhere" / "model").parent
    second = stages(folders, f"first:run.dir={done}")[1]
    assert second.config.actor.model.path == f"{done}/model"
    assert str(plan(folders, "run.name=other").folder) == "outputs/other"
    assert plan(folders, "run.dir=here").jobs[1].config.run.dir == "here/second"


def test_a_dry_run_reads_the_dry_runs_before_it_and_has_no_evaluation(folders: Folders) -> None:
    pipeline = plan(folders, "run.dry_run=true")
    first, second = (job.config for job in pipeline.jobs)
    assert pipeline.dry_run
    assert second.actor.model.path == "outputs/two/first_dry/model"
    assert second.data.path == "outputs/two/first_dry/rows.jsonl"
    assert pipeline.jobs[1].arguments[-1] == "run.dry_run=keep"
    assert complaints(folders, "second:run.dry_run=true") == [
        "run.dry_run=true: is for all stages of a pipeline; remove the stage before it"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stages: {}", "stages={}: must name at least one stage"),
        ("stages: {a: {argument: [x]}}", "no such key; did you mean stages.a.arguments?"),
        ("stages: {evaluation: {arguments: []}}", "must be a name of letters, digits and _"),
        ("stages: [", "not valid YAML"),
    ],
)
def test_mistakes_in_the_file(folders: Folders, tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "conf" / "pipeline" / "two.yaml"
    file.write_text(text)
    lines = complaints(folders)
    assert any(problem in line for line in lines) and all(line.startswith(f"{file}: ") for line in lines)


def test_a_pipeline_is_not_a_run() -> None:
    assert problems("+pipeline=instructgpt", "run.seed=1") == [
        "+pipeline=instructgpt: a pipeline consists of several runs; start it with "
        "python launch/pipeline.py +pipeline=instructgpt"
    ]


@pytest.mark.parametrize("name", Folders((CONF,)).options("pipeline"))
def test_the_pipelines_of_the_repository_are_valid(name: str) -> None:
    *stages, evaluation = plan_pipeline(Folders((CONF,)), [f"+pipeline={name}", "ranks=2"]).jobs
    run_dirs = {job.name: job.config.run.dir for job in stages}
    ppo = stages[-1].config
    assert ppo.actor.model.path == ppo.reference.model.path == f"{run_dirs['sft']}/model"
    assert ppo.critic.init == "auto" and evaluation.arguments[3] == "base,sft,ppo"
    if "reward_model" in run_dirs:
        assert ppo.reward["model"]["path"] == f"{run_dirs['reward_model']}/model"


def test_an_unknown_pipeline(folders: Folders) -> None:
    with pytest.raises(UserError, match=r"^\+pipeline=tow: no such pipeline; .*did you mean two\?$"):
        plan_pipeline(folders, ["+pipeline=tow"])
    with pytest.raises(UserError, match=r"^\+pipeline=NAME is missing; available: .*two"):
        plan_pipeline(folders, ["run.seed=1"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("data.eval_path=${stages.first.data.path}", "data.shuffle=false"),
            "second:data.eval_path is missing: the evaluation needs",
        ),
        (("judge: [", "judge: [reward.lngest=x, "), "evaluation: "),
        (("${stages.second.run", "${stages.x.run"), "evaluation.models: ${stages.x.run.dir}/model: no"),
    ],
)
def test_mistakes_of_the_evaluation(
    folders: Folders, tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    file = tmp_path / "conf" / "pipeline" / "two.yaml"
    file.write_text(file.read_text().replace(*change))
    assert complaints(folders)[0].startswith(problem)
