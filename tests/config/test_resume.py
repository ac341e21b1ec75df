"""Tests which settings may change on resume, and how a run directory in use is handled."""

from __future__ import annotations

import json
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_ds.config.reading import dotted_keys
from ppo_ds.config.resume import IMMUTABLE, MUTABLE, changes, check_resume, ranks_line, unknown_names
from ppo_ds.config.schema import Config, resolved
from ppo_ds.errors import UserError
from ppo_ds.run.record import UNFINISHED, begins_anew, finish_move, names_to_move, open_run_directory
from tests.config.commands import MINIMAL, complaints, compose

CHECKPOINT = Path("outputs/ppo/checkpoints/step_000010")


@cache
def minimal() -> dict[str, Any]:
    return resolved(compose(*MINIMAL))


def settings(*arguments: str) -> dict[str, Any]:
    """Returns the minimal settings with some values replaced, unchecked and without inheritance."""
    tree = deepcopy(minimal())
    for argument in arguments:
        key, _, value = argument.partition("=")
        *sections, name = key.split(".")
        section = tree
        for part in sections:
            section = section[part]
        section[name] = yaml.safe_load(value)
    return tree


def stored(*arguments: str) -> dict[str, Any]:
    """Returns the settings as they are read from a checkpoint."""
    return json.loads(json.dumps(settings(*arguments)))


def test_the_same_settings_are_nothing_to_speak_of() -> None:
    assert check_resume(stored(), settings(), CHECKPOINT) == []


def test_another_number_of_ranks_is_named_in_both_directions() -> None:
    assert ranks_line(2, 2) == []
    assert ranks_line(2, 1) == [
        "changed    ranks 2 -> 1: random numbers, such as those of sampling, differ from here on"
    ]
    assert ranks_line(1, 2) == [
        "changed    ranks 1 -> 2: random numbers, such as those of sampling, differ from here on"
    ]


REFUSED = """
actor.zero.stage 2 3
critic.zero.stage 1 0
actor.model.path org/a org/b
reference.model.path org/a org/b
actor.lora.rank 4 8
critic.init auto actor
rollout.prompts_per_step 16 32
algo.minibatch_size 16 8
algo.epochs 2 1
algo.rollout_is.kind mask truncate
run.seed 0 1
data.path org/a org/b
data.max_prompt_tokens 512 256
algo.kl.estimator k1 k2
algo.reward_shaping.normalize none running
algo.advantage.estimator gae reinforce
"""


@pytest.mark.parametrize(("key", "old", "new"), [row.split() for row in REFUSED.split("\n") if row])
def test_what_matters_is_refused_with_both_values_and_the_remedies(key: str, old: str, new: str) -> None:
    before, now = f"{key}={old}", f"{key}={new}"
    with pytest.raises(UserError) as refused:
        check_resume(stored(before), settings(now), CHECKPOINT)
    (line,) = refused.value.problems
    assert line.startswith(f"{key}={new}: {CHECKPOINT} was made with {old}; ")
    assert "run.dir" in line and f"run.resume_allow_changes=[{key}]" in line

    (allowed,) = check_resume(stored(before), settings(now, f"run.resume_allow_changes=[{key}]"), CHECKPOINT)
    assert allowed == f"changed    allowed by run.resume_allow_changes: {key} {old} -> {new}"


def test_a_dtype_is_the_critics_and_the_references_too() -> None:
    with pytest.raises(UserError) as refused:
        check_resume(stored(), resolved(compose(*MINIMAL, "actor.model.dtype=fp32")), CHECKPOINT)
    assert [line.partition("=")[0] for line in refused.value.problems] == [
        "actor.model.dtype",
        "critic.model.dtype",
        "reference.model.dtype",
    ]


def test_keys_beyond_the_fifth_are_named_in_one_line() -> None:
    other = ("run.seed=3", "data.path=org/b", "data.shuffle=false", "actor.zero.stage=1", "algo.epochs=7")
    with pytest.raises(UserError) as refused:
        check_resume(
            stored(), settings(*other, "actor.model.path=org/b", "algo.action_level=sequence"), CHECKPOINT
        )
    *lines, rest = refused.value.problems
    assert len(lines) == 5 and all("restore that value" in line for line in lines)
    assert rest.startswith("changed too: ") and rest.endswith(f"; {CHECKPOINT} seems to be of another run")
    keys = [line.partition("=")[0] for line in lines] + rest.partition(": ")[2].partition(";")[0].split(", ")
    assert {"run.seed", "data.path", "data.shuffle", "algo.epochs", "actor.model.path"} <= set(keys)


def test_every_refused_key_is_named_and_a_section_may_be_allowed() -> None:
    other = ("data.path=org/b", "data.shuffle=false", "run.seed=3")
    with pytest.raises(UserError) as refused:
        check_resume(stored(), settings(*other, "run.resume_allow_changes=[run.seed]"), CHECKPOINT)
    assert [line.partition("=")[0] for line in refused.value.problems] == ["data.path", "data.shuffle"]
    assert all("run.resume_allow_changes=[run.seed,data." in line for line in refused.value.problems)
    (line,) = check_resume(stored(), settings(*other, "run.resume_allow_changes=[run.seed,data]"), CHECKPOINT)
    assert line == (
        "changed    allowed by run.resume_allow_changes: run.seed 0 -> 3; data.path org/prompts -> org/b; "
        "data.shuffle true -> false"
    )


def test_what_may_change_is_named() -> None:
    now = settings(
        "actor.optim.lr=2.0e-6",
        "algo.kl.coef=0.1",
        "run.steps=7",
        "sampling.temperature=0.7",
        "reward.batch=4",
        "actor.zero.offload_optimizer=true",
    )
    assert check_resume(stored("reward.path=pkg.mod:score"), now, CHECKPOINT) == [
        "changed    since the checkpoint: run.steps 2 -> 7; actor.optim.lr 1e-06 -> 2e-06; "
        "sampling.temperature 1.0 -> 0.7; algo.kl.coef 0.05 -> 0.1; reward.batch null -> 4"
    ]


def test_another_source_of_the_old_log_probs_is_named() -> None:
    """Both sources differ by at most health.max_parity."""
    (line,) = check_resume(stored(), settings("algo.old_logprobs=recompute"), CHECKPOINT)
    assert line.startswith("changed ") and "algo.old_logprobs auto -> recompute" in line


SILENT = """
run.name=other run.dir=elsewhere run.stop_at_step=1 run.profile=1 run.max_minutes=3 run.timeout_minutes=4
run.threads=1 run.verbose=true memory.train_tokens=99 memory.layout=padded checkpoint.every=3
checkpoint.minutes=0.5 checkpoint.keep_last=1 health.max_skips=1 eval.greedy=false tracker.samples=0
tracker.wandb.mode=offline actor.zero.offload_optimizer=true reference.zero.stage=3
actor.model.gradient_checkpointing=true data.eval_path=org/heldout run.resume_allow_changes=[data]
"""


def test_what_changes_no_number_changes_silently() -> None:
    assert check_resume(stored(), settings(*SILENT.split()), CHECKPOINT) == []


def test_paths_below_the_run_directory_move_with_it() -> None:
    made = ("actor.model.path", "data.path")
    before = stored("run.dir=outputs/a", *(f"{key}=outputs/a/start/x" for key in made))
    assert (
        check_resume(
            before, settings("run.dir=outputs/b", *(f"{key}=outputs/b/start/x" for key in made)), CHECKPOINT
        )
        == []
    )
    with pytest.raises(UserError, match="data.path=outputs/b/start/y"):
        check_resume(
            before,
            settings(
                "run.dir=outputs/b", "actor.model.path=outputs/b/start/x", "data.path=outputs/b/start/y"
            ),
            CHECKPOINT,
        )


def test_a_key_that_is_younger_than_the_checkpoint_had_its_default() -> None:
    before = stored()
    del before["data"]["shuffle"], before["algo"]["target_kl"]
    assert check_resume(before, settings(), CHECKPOINT) == []
    assert [change[0] for change in changes(before, settings("data.shuffle=false", "algo.target_kl=1"))] == [
        "data.shuffle",
        "algo.target_kl",
    ]


def test_the_kind_of_reward_stays_wherever_it_stands() -> None:
    before = {
        **stored(),
        "reward": {
            "_target_": "a.Mix",
            "parts": {"x": {"weight": 1.0, "reward": {"_target_": "a.B", "model": {"path": "p"}}}},
        },
    }
    now = {
        **settings(),
        "reward": {
            "_target_": "a.Mix",
            "parts": {"x": {"weight": 2.0, "reward": {"_target_": "a.C", "model": {"path": "q"}}}},
        },
    }
    with pytest.raises(UserError) as refused:
        check_resume(before, now, CHECKPOINT)
    assert [line.partition("=")[0] for line in refused.value.problems] == [
        "reward.parts.x.reward._target_",
        "reward.parts.x.reward.model.path",
    ]


def test_each_pattern_means_a_key() -> None:
    known = [*dotted_keys(Config), "reward._target_", "reward.parts.x.reward._target_", "prepare.dir"]
    for pattern in MUTABLE + IMMUTABLE:
        assert any(fnmatchcase(key, pattern) for key in known), pattern


def test_names_in_may_change_are_keys() -> None:
    (line,) = complaints(*MINIMAL, "run.resume_allow_changes=[data.path,actor.zero.stag]")
    assert line == "run.resume_allow_changes=actor.zero.stag: no such key; did you mean actor.zero.stage?"
    config = compose(
        *MINIMAL,
        "run.resume_allow_changes=[data,actor.zero.stage,reward.anything,prepare.dir,actor.deepspeed.x]",
    )
    assert list(unknown_names(config)) == []


# -- the run directory -----------------------------------------------------------------------------


def used(run_dir: Path, *arguments: str) -> None:
    """Fills the run directory like a run of three steps that was killed before its first checkpoint."""
    open_run_directory(run_dir, settings(f"run.dir={run_dir}", *arguments), None)
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    (run_dir / "samples").mkdir()
    (run_dir / "samples" / "step_000001.jsonl").write_text("{}\n")
    (run_dir / "wandb.id").write_text("abc\n")


def opened(run_dir: Path, *arguments: str, start: Path | None = None) -> list[str]:
    lines = open_run_directory(run_dir, settings(f"run.dir={run_dir}", *arguments), start)
    assert yaml.safe_load((run_dir / "config.yaml").read_text()) == settings(f"run.dir={run_dir}", *arguments)
    return lines


def test_a_new_directory_is_the_owners_and_has_the_config(tmp_path: Path) -> None:
    assert opened(tmp_path / "deep" / "run") == []
    assert (tmp_path / "deep" / "run").stat().st_mode & 0o777 == 0o700
    assert [file.name for file in (tmp_path / "deep" / "run").iterdir()] == ["config.yaml"]


def test_the_same_run_again_makes_its_steps_again(tmp_path: Path) -> None:
    used(tmp_path)
    (line,) = opened(tmp_path, "tracker.samples=0")
    assert "had 3 steps and no checkpoint; they are run again" in line
    assert not (tmp_path / "earlier_1").exists()


def test_the_record_of_other_settings_is_kept_and_named(tmp_path: Path) -> None:
    used(tmp_path, "actor.optim.lr=1.0e-6")
    (line,) = opened(tmp_path, "actor.optim.lr=2.0e-6")
    assert (
        "had 3 steps" in line
        and str(tmp_path / "earlier_1") in line
        and "actor.optim.lr 1e-06 -> 2e-06" in line
    )
    assert sorted(file.name for file in (tmp_path / "earlier_1").iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "samples",
        "wandb.id",
    ]
    assert len((tmp_path / "earlier_1" / "metrics.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "samples").exists()

    assert opened(tmp_path, "actor.optim.lr=3.0e-6") == []  # no step was run since, so nothing is moved
    used_again = tmp_path / "metrics.jsonl"
    used_again.write_text('{"step": 1}\n')
    assert "earlier_2" in opened(tmp_path, "actor.optim.lr=4.0e-6")[0]


def test_a_directory_without_a_readable_config_keeps_its_record_too(tmp_path: Path) -> None:
    used(tmp_path)
    (tmp_path / "config.yaml").write_text("run: [")
    assert "earlier_1" in opened(tmp_path)[0]


def test_who_goes_on_from_its_own_checkpoint_keeps_the_record_in_place(tmp_path: Path) -> None:
    used(tmp_path, "actor.optim.lr=1.0e-6")
    assert opened(tmp_path, "actor.optim.lr=2.0e-6", start=tmp_path / "checkpoints" / "step_000002") == []
    assert (tmp_path / "metrics.jsonl").exists()


def test_who_goes_on_from_another_runs_checkpoint_does_not(tmp_path: Path) -> None:
    used(tmp_path)
    assert "earlier_1" in opened(tmp_path, start=tmp_path.parent / "other" / "checkpoints" / "step_000002")[0]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_checkpoints_that_are_not_continued_are_moved_with_their_record(tmp_path: Path) -> None:
    """Otherwise the new run would treat the checkpoints as its own and delete them after its next save."""
    checkpointed(tmp_path)
    start = tmp_path / "earlier_1" / "checkpoints" / "step_000001"
    opened(tmp_path, start=start)
    assert (tmp_path / "earlier_1" / "checkpoints" / "step_000002" / "file").exists()
    assert not (tmp_path / "checkpoints").exists()


# -- run.resume=restart ----------------------------------------------------------------------------


def checkpointed(run_dir: Path, *arguments: str, reason: str | None = "signal") -> None:
    """Fills the run directory with everything that a run can write, like a run of three steps."""
    used(run_dir, *arguments)
    for folder in (
        *("checkpoints/step_000002", "dumps/step_000003", "exports", "wandb", "model", "start"),
        *("step_models/step_000002", "profile/step_000002"),
    ):
        (run_dir / folder).mkdir(parents=True)
        (run_dir / folder / "file").touch()
    (run_dir / "run.lock").touch()
    if reason is not None:
        (run_dir / "summary.json").write_text(json.dumps({"exit_reason": reason}))


def restarted(run_dir: Path, *arguments: str) -> list[str]:
    """Opens the directory as a start with run.resume=restart does."""
    now = settings(f"run.dir={run_dir}", "run.resume=restart", *arguments)
    restart = begins_anew(run_dir, now)
    return [str(restart), *open_run_directory(run_dir, now, None, restart)]


def test_restart_moves_all_that_a_run_has_written_and_nothing_else(tmp_path: Path) -> None:
    checkpointed(tmp_path, "actor.optim.lr=1.0e-6")
    anew, line = restarted(tmp_path, "actor.optim.lr=2.0e-6")
    assert anew == "True"
    assert "had 3 steps" in line and "earlier_1; changed settings: actor.optim.lr 1e-06 -> 2e-06" in line
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["config.yaml", "earlier_1", "run.lock", "start"]
    moved = sorted(path.name for path in (tmp_path / "earlier_1").iterdir())
    assert moved == ["checkpoints", "config.yaml", "dumps", "exports", "metrics.jsonl", "model", "profile",
                     "samples", "step_models", "summary.json", "wandb", "wandb.id"]  # fmt: skip
    before = yaml.safe_load((tmp_path / "earlier_1" / "config.yaml").read_text())
    assert before["actor"]["optim"]["lr"] == 1e-6
    checkpointed(tmp_path / "other", "actor.optim.lr=1.0e-6")
    assert (
        restarted(tmp_path / "other", "actor.optim.lr=1.0e-6")[0] == "True"
    )  # the settings are the same, but the earlier run was not started with restart


def test_restart_in_an_unused_directory_only_starts(tmp_path: Path) -> None:
    assert restarted(tmp_path / "new") == ["True"]
    used(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert restarted(tmp_path) == ["True"] and not (tmp_path / "earlier_1").exists()


def test_a_restart_that_is_killed_and_started_again_goes_on(tmp_path: Path) -> None:
    """A job that a scheduler requeues with the same command line must not begin anew each time."""
    checkpointed(tmp_path, "actor.optim.lr=1.0e-6")
    for start, reason in enumerate((None, "signal", "time_limit", "error", "stop_at_step")):
        anew, *lines = restarted(tmp_path, "actor.optim.lr=2.0e-6", f"run.max_minutes={start + 1}")
        assert (anew, len(lines)) == (str(start == 0), 1), reason
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        (tmp_path / "summary.json").write_text(json.dumps({"exit_reason": reason}) if reason else "")
    assert not (tmp_path / "earlier_2").exists()


def test_restart_begins_anew_once_its_run_is_done_or_the_settings_differ(tmp_path: Path) -> None:
    checkpointed(tmp_path, "run.resume=restart", reason="done")
    assert restarted(tmp_path)[0] == "True"
    checkpointed(tmp_path / "b", "run.resume=restart")
    assert restarted(tmp_path / "b", "actor.optim.lr=2.0e-6")[0] == "True"
    checkpointed(tmp_path / "c", "run.resume=auto")  # the restarted run was continued with auto
    assert restarted(tmp_path / "c")[0] == "True"
    checkpointed(tmp_path / "d", "run.resume=restart")
    (tmp_path / "d" / "config.yaml").unlink()
    assert restarted(tmp_path / "d")[0] == "True"


class Killed(BaseException):
    """Raised to simulate a kill -9."""


@pytest.mark.parametrize("renames", range(13))
def test_a_move_that_a_kill_has_interrupted_is_completed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    checkpointed(tmp_path, "actor.optim.lr=1.0e-6")
    rename, done = Path.rename, []

    def kill(path: Path, target: Path) -> Path:
        if len(done) == renames:
            raise Killed
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", kill)
        try:
            restarted(tmp_path, "actor.optim.lr=2.0e-6")
        except Killed:
            assert [path.name for path in tmp_path.glob("earlier_*")] == ["earlier_1" + UNFINISHED]
    lines = finish_move(tmp_path)
    assert bool(lines) == (len(done) == renames and renames < 13)
    assert sorted(path.name for path in (tmp_path / "earlier_1").iterdir()) == [
        "checkpoints", "config.yaml", "dumps", "exports", "metrics.jsonl", "model", "profile", "samples",
        "step_models", "summary.json", "wandb", "wandb.id",
    ]  # fmt: skip
    assert finish_move(tmp_path) == []
    assert len(restarted(tmp_path, "actor.optim.lr=2.0e-6")) == 1  # nothing is left to move
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yaml",
        "earlier_1",
        "run.lock",
        "start",
    ]


def test_restart_moves_the_prepared_folder_if_it_was_made_in_another_way(tmp_path: Path) -> None:
    made = [f"prepare={{_target_: a.b, dir: {tmp_path}/start/deep, seed: 1}}"]
    checkpointed(tmp_path, *made)
    assert "start" not in names_to_move(tmp_path, settings(f"run.dir={tmp_path}", *made), None, True)
    other = settings(f"run.dir={tmp_path}", made[0].replace("seed: 1", "seed: 2"))
    assert "start" in names_to_move(tmp_path, other, None, True)
    elsewhere = settings(f"run.dir={tmp_path}", "prepare={_target_: a.b, dir: /data, seed: 2}")
    assert "start" in names_to_move(tmp_path, elsewhere, None, True)


def test_the_refusal_of_a_changed_run_names_restart() -> None:
    with pytest.raises(UserError, match=r"begin anew with run.resume=restart, or allow the change with"):
        check_resume(settings(), settings("run.seed=9"), CHECKPOINT)


def test_recorded_keys_of_other_variants_are_ignored() -> None:
    before = stored("algo.policy.loss=ppo")
    before["algo"]["policy"] |= {"tau_pos": 3.0, "delta": None, "cov_low": 1.0}
    assert changes(before, minimal()) == []
    now = settings()
    now["algo"]["policy"] = resolved(compose(*MINIMAL, "algo.policy.loss=sapo"))["algo"]["policy"]
    assert changes(stored(), now) == [("algo.policy.loss", "ppo", "sapo")]
