from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from launch.cli import CONF, to_yaml
from launch.composing import STAGE_GROUPS
from ppo_ds.config.reading import dotted_keys
from ppo_ds.config.schema import Config, resolved
from tests.config.commands import MINIMAL, complaints, compose, model_folder

EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
# keys that an experiment leaves to the user
BRING = {"grpo": {"data.path": "org/problems"}}


GROUPS = {"rlhf_70b_lora": 8}  # ranks that generate together
SMALL_BATCHES = ("minimind", "zysnlp")  # two samples per optimizer step


def brought(experiment: str) -> list[str]:
    return [f"{key}={value}" for key, value in BRING.get(experiment, {}).items()]


@pytest.mark.parametrize("ranks", [1, 8])  # which has the divisors 2 and 4
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_sound_for_any_usual_number_of_ranks(experiment: str, ranks: int) -> None:
    ranks = min(ranks, 2) if experiment in SMALL_BATCHES else ranks
    arguments = f"+experiment={experiment}", *brought(experiment)
    if ranks % GROUPS.get(experiment, 1):
        assert complaints(*arguments, ranks=ranks) == [
            "rollout.vllm.tensor_parallel=8: must divide the number of ranks, 1; use one of 1"
        ]
        arguments += ("run.dry_run=true",)
    assert compose(*arguments, ranks=ranks).run.name == experiment
    compose("debug=tiny", f"+experiment={experiment}", *brought(experiment), ranks=ranks)


@pytest.mark.parametrize("experiment", BRING)
def test_what_an_experiment_leaves_open_is_asked_for(experiment: str) -> None:
    missing = {line.split(" is missing")[0] for line in complaints(f"+experiment={experiment}")}
    assert missing == set(BRING[experiment])


@pytest.mark.parametrize("file", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda file: file.stem)
def test_experiments_leave_reward_and_algo_to_their_groups(file: Path) -> None:
    body = yaml.safe_load(file.read_text())
    assert not {"reward", "algo"} & body.keys()


OPTIONS = sorted(
    f"{file.parent.name}={file.stem}"
    for file in CONF.glob("*/*.yaml")
    if file.parent.name not in ("experiment", "pipeline")
)


TWO_PARTS = [
    "reward=weighted",
    *(f"reward.parts.{name}.reward._target_=ppo_ds.rewards.rules.FormatReward" for name in ("one", "two")),
]

# The sections that the options of a group set; "" is the whole config.
SECTIONS = {"model": "actor.model", "zero": "", "debug": ""}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_sets_its_keys(option: str) -> None:
    fill = {
        "algo=gdpo": TWO_PARTS,
        "reward=environment": ["rollout.environment.path=pkg.mod:Game"],
        "reward=model": ["reward.model.path=org/reward"],
        "reward=get_score": ["reward.model.path=org/reward"],
        "reward=teacher": ["reward.model.path=org/teacher"],
        "reward=function": ["reward.path=pkg.mod:score"],
        "reward=regex": ["reward.pattern=x"],
        "reward=remote": ["reward.url=http://localhost"],
        "reward=weighted": ["reward.parts.format.reward._target_=ppo_ds.rewards.rules.FormatReward"],
        "algo=sums": ["rollout.prompts_per_step=128"],
    }.get(option, [])
    if option.startswith("algo="):
        fill = [*fill, "rollout.samples_per_prompt=4"]
    group, name = option.split("=")
    config = compose(
        *(MINIMAL[3:4] if group == "debug" else MINIMAL[3:]),
        *([] if group == "model" else ["actor.model.path=org/actor"]),
        *([] if group == "reward" or option == "algo=gdpo" else MINIMAL[1:3]),
        f"model@actor.model={name}" if group == "model" else option,
        *fill,
    )
    found = dict(leaves(json.loads(json.dumps(config.model_dump()))))  # converts tuples to lists
    wanted = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    section = SECTIONS.get(group, group)
    for key, value in leaves(wanted, f"{section}." if section else ""):
        if key.split(".")[0] not in type(config).model_fields:  # a key for another stage
            assert group in STAGE_GROUPS and key in dotted_keys(Config), key
        elif key not in found:  # a key of another variant, at its default
            assert (key, value) == ("rollout.vllm.tensor_parallel", 1)
        else:
            computed = isinstance(value, str) and value.startswith("${")
            assert found[key] == value or computed or value is None, (
                key
            )  # the config fills in some null values


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each leaf of a tree. An empty mapping is a leaf."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_rlhf_runs_without_a_network_on_local_models_and_data(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    data = tmp_path / "a.jsonl"
    data.touch()
    config = compose(
        "+experiment=rlhf",
        f"actor.model.path={folder}",
        f"data.path={data}",
        "reward=model",
        f"reward.model.path={folder}",
    )
    assert config.actor.model.attn_implementation == "sdpa"
    assert not any(
        (
            config.actor.zero.offload_optimizer,
            config.critic.zero.offload_optimizer,
            config.reference.zero.offload_params,
        )
    )
    assert config.eval.every is None and config.data.eval_path is None


def test_other_data_leave_no_evaluation_of_the_experiment_behind() -> None:
    def evaluation(*arguments: str) -> tuple[str | None, int | None, bool]:
        config = compose("+experiment=rlhf", *arguments)
        return config.data.eval_path, config.eval.every, config.checkpoint.keep_best

    theirs = "trl-lib/ultrafeedback-prompt"
    for same in ((), ("data.split=train",), (f"data.path={theirs}",)):
        assert evaluation(*same) == (theirs, 50, True)
    none = (None, None, False)
    assert evaluation("data.path=org/a") == none
    assert evaluation("data.path=null", "data.mix=[{path:org/a}]") == none
    assert evaluation("data.path=org/a", "data.eval_path=org/b") == ("org/b", 50, True)
    assert complaints("+experiment=rlhf", "data.path=org/a", "eval.every=5") == [
        "eval.every=5: needs data.eval_path (it is null); otherwise set eval.every=null"
    ]


def test_a_length_on_the_command_line_replaces_that_of_the_experiment() -> None:
    sft = ("+experiment=sft", "actor.model.path=org/base", "data.path=org/chats")

    def length(*arguments: str) -> tuple[int | None, float | None]:
        run = compose(*arguments).run
        return run.steps, run.epochs

    assert length(*sft) == (None, 1)
    assert length(*sft, "run.steps=7") == length("run.steps=7", *sft) == (7, None)
    assert length("+experiment=quickstart", "run.epochs=2") == (None, 2)
    assert complaints(*sft, "run.steps=7", "run.epochs=2")[0].startswith("run.steps=7: needs run.epochs=null")


def test_an_evaluation_set_without_training_data_stays(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndata: {eval_path: org/b}\neval: {every: 3}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    config = compose("--config-dir", str(tmp_path), "+experiment=mine", *MINIMAL)
    assert (config.data.eval_path, config.eval.every) == ("org/b", 3)


@pytest.mark.parametrize("reward", ["minimind", "minimind_reasoning"])
def test_trust_in_the_code_of_miniminds_reward_model_is_for_that_model_alone(reward: str) -> None:
    key = "reward.parts.model.reward" + (".reward" if reward == "minimind_reasoning" else "")

    def trust(*more: str) -> bool:
        config = compose("+experiment=minimind", f"reward={reward}", *more)
        section = config.reward["parts"]["model"]["reward"]
        return section.get("reward", section)["model"]["trust_remote_code"]

    assert trust() is True and trust(f"{key}.model.path=org/other") is False
    assert trust(f"{key}.model.path=org/other", f"{key}.model.trust_remote_code=true") is True


def test_a_reward_swapped_on_the_command_line_leaves_nothing_behind() -> None:
    for arguments in (
        ("+experiment=rlhf", "reward=function"),
        ("reward=function", "+experiment=rlhf"),
        ("+experiment=rlhf", "+reward=function"),
    ):
        assert compose(*arguments, "reward.path=pkg:fn").reward == {
            "_target_": "ppo_ds.rewards.function.FunctionReward",
            "path": "pkg:fn",
        }


def test_groups_win_over_experiments_in_any_order_and_need_no_plus() -> None:
    config = compose(
        "zero=stage3",
        "model@actor.model=qwen2.5-1.5b-instruct",
        "tracker=local",
        "debug=tiny",
        "experiment=rlhf",
    )
    assert (config.actor.zero.stage, config.critic.zero.stage, config.reference.zero.stage) == (3, 3, 3)
    assert config.actor.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.tracker.wandb.mode == "disabled" and config.run.steps == 2


def test_the_last_choice_of_a_group_counts_but_experiments_are_not_dropped() -> None:
    assert compose(*MINIMAL, "reward=model", "reward=sums", "reward.path=a:b").reward["path"] == "a:b"
    assert compose("+experiment=[rlhf,rlhf_7b]").run.name == "rlhf_7b"
    assert complaints("+experiment=rlhf", "experiment=rlhf_7b") == [
        "experiment=rlhf_7b: a second experiment; to combine two, write +experiment=[a,b]"
    ]


def test_keys_are_set_with_or_without_plus_and_removed_with_tilde() -> None:
    config = compose(
        *MINIMAL,
        "algo.epochs=3",
        "+algo.gae.lam=0.9",
        "++algo.gae.gamma=0.5",
        "actor.deepspeed.zero_optimization.overlap_comm=true",
    )
    assert (config.algo.epochs, config.algo.gae.lam, config.algo.gae.gamma) == (3, 0.9, 0.5)
    assert config.actor.deepspeed == {"zero_optimization": {"overlap_comm": True}}
    assert compose("+experiment=rlhf", "~checkpoint.every").checkpoint.every is None


def test_the_local_rank_of_the_launcher_is_dropped() -> None:
    assert compose("--local_rank=1", *MINIMAL) == compose("--local-rank", "1", *MINIMAL) == compose(*MINIMAL)


@pytest.mark.parametrize("text", ["a,b", "a=b", "with space", "a(b", "it's", "[x", "1,2"])
def test_values_that_hydra_cannot_read_are_text(text: str) -> None:
    assert compose(*MINIMAL, f"run.name={text}").run.name == text


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("algo.epoch=3", "algo.epoch=3: no such key; did you mean algo.epochs?"),
        ("+unknown=1", "unknown=1: no such key; the keys of the config are stage, run, actor"),
        ("steps=4", "steps=4: no such key; did you mean run.steps?"),
        ("actor.optim.lr=fast", "actor.optim.lr=fast: must be a number"),
        ("actor.model=gpt2", "actor.model=gpt2: must be a section with keys path, revision"),
        (
            "sampling.stop_token_ids=1,2",
            "sampling.stop_token_ids=1,2: must be a list, as in sampling.stop_token_ids=[1,2] or null",
        ),
        (
            "data.mix={path:p.jsonl}",
            "data.mix={path:p.jsonl}: must be a list, as in data.mix=[{path:p.jsonl}]",
        ),
        ("algo.kl=[1,2]", "algo.kl=[1,2]: must be a section with keys place, estimator, coef, clamp"),
        ("algo.polcy.loss=x", "algo.polcy.loss=x: no such key; did you mean algo.policy.loss?"),
        ("actr.optim.lr=1", "actr.optim.lr=1: no such key; did you mean actor.optim.lr?"),
        ("algo.zzz.x.y=1", "algo.zzz.x.y=1: no such key; the keys of algo are kl, gae"),
        (
            "+experiment=rhlf",
            "+experiment=rhlf: no such experiment; available: calculator, deepspeed_chat, grpo,",
        ),
        ("algo=standart", "algo=standart: no such algo; available: cispo, dapo, deepspeed_chat, distill,"),
        (
            "reward={path:x}",
            "reward={path:x}: no such reward; available: deberta_v3_large, environment, exact_match,",
        ),
        ("model@actor=x", "model@actor=x: no such model; available: llama3.1"),
        ("modl@actor.model=x", "modl@actor.model=x: no such group; the groups are"),
        ("foo", "foo: not understood; write KEY=VALUE"),
        ("hydra.run.dir=x", "hydra.run.dir=x: Hydra only composes the config"),
        ("hydra/launcher=x", "hydra/launcher=x: Hydra only composes the config"),
        ("~run.stepss", "~run.stepss: nothing to reset; the key has its default already or does not exist"),
        (
            "~run.steps=7",
            "~run.steps=7: nothing to reset; the key has its default already or another value or does not",
        ),
        ("data.path=${run.dirr}/a", "data.path: Interpolation key 'run.dirr' not found"),
        ("-m", "--multirun: is not supported, since every rank would run every job"),
        ("--foo", "unrecognized arguments: --foo; see --help"),
        ("--cfg=all", "argument --cfg/-c: invalid choice: 'all'"),
        ("--config-dir=/nowhere", "--config-dir=/nowhere: no such directory"),
        ("--config-name=nothing", "--config-name=nothing: no nothing.yaml in"),
    ],
)
def test_one_line_for_each_mistake(argument: str, line: str) -> None:
    lines = complaints(*MINIMAL, argument)
    assert len(lines) == 1 and lines[0].startswith(line), lines
    assert "use +" not in lines[0].lower()


@pytest.mark.parametrize(
    ("argument", "suggestion"),
    [
        *(("algo=grop", "grpo"), ("algo=ppo", "standard"), ("algo=DAPO", "dapo"), ("tracker=wnadb", "wandb")),
        ("--data.path=x.jsonl", "data.path=x.jsonl"),
    ],
)
def test_what_a_user_may_have_meant_is_suggested(argument: str, suggestion: str) -> None:
    lines = complaints(*MINIMAL, argument)
    assert len(lines) == 1 and lines[0].endswith(f"; did you mean {suggestion}?"), lines


def test_mistakes_of_hydra_and_ours_are_reported_together() -> None:
    assert [line.split(":")[0] for line in complaints(*MINIMAL, "foo", "hydra.x=1", "algo.epoch=3")] == [
        "foo",
        "hydra.x=1",
        "algo.epoch=3",
    ]
    assert [line.split(":")[0] for line in complaints("+experiment=x", "reward=y", "foo")] == [
        "foo",
        "+experiment=x",
        "reward=y",
    ]


def test_a_key_that_cannot_be_reset_hides_no_other_problem() -> None:
    lines = complaints(*MINIMAL, "~zzz", "algo.epoch=3", "~algo.kl", "algo.level=token", "algo.kl.coef=-1")
    assert [line.split(":")[0] for line in lines] == [
        "~zzz",
        "~algo.kl",
        "algo.epoch=3",
        "algo.level=token",
        "algo.kl.coef=-1",
    ]


def test_without_an_experiment_what_is_missing_is_named() -> None:
    missing = [
        "actor.model.path",
        "rollout.prompts_per_step",
        "sampling.max_new_tokens",
        "reward",
        "run.steps",
        "data.path",
    ]
    *lines, last = complaints()
    assert [line.split(" is missing")[0] for line in lines] == missing
    assert last.startswith("no arguments were given: begin with an experiment, as in +experiment=rlhf")


def test_interpolations_reach_keys_that_only_have_defaults() -> None:
    config = compose(
        *MINIMAL,
        "run.name=x",
        "actor.model.revision=${run.dir}/${algo.gae.lam}",
        "data.revision=${actor.model.path}",
    )
    assert config.actor.model.revision == "outputs/x/0.95" and config.data.revision == "org/actor"


def test_the_resolved_config_gives_the_same_run_again(tmp_path: Path) -> None:
    config = compose("+experiment=quickstart", f"run.dir={tmp_path}", "actor.optim.lr=1e-6")
    (tmp_path / "config.yaml").write_text(to_yaml(resolved(config)))
    again = ("--config-path", str(tmp_path), "--config-name", "config")
    assert compose(*again) == config
    assert compose(*again, "algo.epochs=7", "zero=stage3").algo.epochs == 7
    assert complaints(*again, "algo.epoch=7")[0].startswith("algo.epoch=7: no such key")


def test_experiments_of_the_users_own_folder(tmp_path: Path) -> None:
    own = tmp_path / "with space" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [rlhf, override /zero: stage1]\nrun: {name: mine}\n"
    )
    flag = f"--config-dir={own.parent}"
    config = compose(flag, "+experiment=mine")
    assert (config.run.name, config.actor.zero.stage, config.actor.model.path) == (
        "mine",
        1,
        "Qwen/Qwen2.5-0.5B-Instruct",
    )
    assert "grpo, mine, minimind" in complaints(flag, "+experiment=mien")[0]
    (own / "mine.yaml").write_text("a: [1\nb: 2")
    assert "mine.yaml" in complaints(flag, "+experiment=mine")[0]
    (own / "mine.yaml").write_text("# @package _global_\ndefaults: [{override /nothing: x}]")
    assert len(complaints(flag, "+experiment=mine")) == 1
