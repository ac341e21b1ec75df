"""Tests the doctor's figures that experiments quote, and that the tutorials' experiments fit in 24 GB."""

from __future__ import annotations

from math import ceil

import pytest

from launch.cli import CONF
from ppo_ds.config.schema import Config, reward_models
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.planning.budgets import GPU_LIMITS, MAX_DECODED_ROWS, STEP, resolve, with_numbers
from ppo_ds.planning.ppo_memory import estimate
from ppo_ds.planning.run_memory import Estimate, Hardware
from ppo_ds.tools.doctor.model_shapes import plan_models
from ppo_ds.tools.doctor.ppo import disk_bytes
from ppo_ds.tools.doctor.report import Report, check_disk
from tests.config.commands import MINIMAL, compose
from tests.support.hub_models import hub_folders

GIB = 2**30
CHECKPOINTING = ("actor.model.gradient_checkpointing=true",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return hub_folders(tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize(
    ("experiment", "more", "gpus", "gib", "memory", "disk", "host"),
    [
        ("zysnlp", (), 1, 24, 21, None, None),
        ("sequence_kl", (), 1, 24, 21, None, None),
        ("n_plus", (), 1, 24, 21, None, None),
        ("deepspeed_chat", (), 1, 24, 14, None, 32),
        ("minimind", (), 1, 24, 5, None, None),
        ("rlhf", (), 1, 80, 61, 46, None),
        ("rlhf", CHECKPOINTING, 1, 24, 21, 46, None),
        ("rlhf_7b", (), 8, 80, 64, 684, None),
        ("rlhf_7b_offload", (), 8, 40, 34, None, 321),
        ("rlhf_7b_offload", (), 4, 80, 38, None, 321),
        ("rlhf_70b_lora", (), 8, 79.2, 69, 504, None),
        ("rlhf_70b", (), 64, 79.2, 70, 1932, None),
    ],
)
def test_experiments_quote_the_doctor(
    folders: dict[str, str],
    experiment: str,
    more: tuple[str, ...],
    gpus: int,
    gib: float,
    memory: int,
    disk: int | None,
    host: int | None,
) -> None:
    arguments = [f"+experiment={experiment}", *more]
    config = compose(*arguments, ranks=gpus)
    models = {"actor.model": config.actor.model.path}
    models |= {} if config.critic.model.path is None else {"critic.model": config.critic.model.path}
    models |= {key: model["path"] for key, model in reward_models(config.reward)}
    paths = [f"{key}.path={folders[path]}" for key, path in models.items()]
    config, report = compose(*arguments, *paths, ranks=gpus), Report()
    shapes = plan_models(config, load_tokenizer(config.actor.model.path, key="actor.model.path"), report)
    assert shapes is not None, report.lines
    check_disk(config, *disk_bytes(config, shapes), report)
    lines = {line.name: line.text for line in report.lines}
    hardware = Hardware(gpus, int(gib * GIB))

    def estimated(trial: Config) -> Estimate:
        return estimate(trial, shapes, hardware)

    found = estimated(with_numbers(config, resolve(config, estimated, hardware.usable, on_gpu=True).numbers))

    comment = " ".join((CONF / "experiment" / f"{experiment}.yaml").read_text().split())
    peak = found.peak / GIB
    assert peak <= hardware.usable / GIB and round(peak) == memory and f"{memory} GiB" in comment
    if disk is not None:
        needed = float(lines["disk"].split("run.dir=")[1].split(": ")[1].split(" GiB")[0])
        assert ceil(needed) == disk and f"{disk} GiB" in comment
    if host is not None:
        assert ceil(found.host * gpus / GIB) in (host, host + 1) and f"{host} GiB" in comment
    if experiment == "deepspeed_chat":  # critic.init=auto takes the reward model
        assert lines["critic"].startswith(folders["Skywork/Skywork-Reward-V2-Qwen3-0.6B"])


@pytest.mark.parametrize(
    ("experiment", "gpus", "gib"),
    [
        ("zysnlp", 1, 24),
        ("deepspeed_chat", 1, 24),
        ("minimind", 1, 24),
        ("rlhf", 1, 80),
        ("rlhf", 8, 80),
        ("rlhf_7b", 8, 80),
        ("rlhf_7b_offload", 8, 40),
        ("rlhf_7b_offload", 4, 80),
    ],
)
def test_automatic_budgets_fill_the_gpu_and_fit(
    folders: dict[str, str], experiment: str, gpus: int, gib: int
) -> None:
    config = compose(f"+experiment={experiment}", ranks=gpus)
    models = {"actor.model": config.actor.model.path}
    models |= {key: model["path"] for key, model in reward_models(config.reward)}
    paths = [f"{key}.path={folders[path]}" for key, path in models.items()]
    config, report = compose(f"+experiment={experiment}", *paths, ranks=gpus), Report()
    shapes = plan_models(config, load_tokenizer(config.actor.model.path, key="actor.model.path"), report)
    hardware = Hardware(gpus, gib * GIB)

    def estimated(trial: Config) -> Estimate:
        return estimate(trial, shapes, hardware)

    numbers = resolve(config, estimated, hardware.usable, on_gpu=True).numbers
    assert set(numbers) == {"rollout_tokens", "score_tokens", "train_tokens"}
    found = estimated(with_numbers(config, numbers))
    assert found.peak <= hardware.usable
    for name, tokens in numbers.items():  # a larger number changes the plan, does not fit, or is not faster
        more = estimated(with_numbers(config, numbers | {name: tokens + STEP}))
        limit = GPU_LIMITS.get(name, max(32768, min(found.rows, MAX_DECODED_ROWS) * found.row_tokens))
        assert tokens == limit or more.peak > hardware.usable or more.generation != found.generation, name


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        ((), "1.0 GiB needed (0 checkpoints of 12.0 GiB, export of 1.0 GiB)"),
        (("checkpoint.export_every=30",), "4.0 GiB needed (0 checkpoints of 12.0 GiB, 4 exports of 1.0 GiB)"),
        # two are kept while the third is written
        (("checkpoint.export_every=9", "checkpoint.keep_exports=2"), "4.0 GiB needed"),
    ],
)
def test_the_disk_space_includes_the_exports_during_the_run(more: tuple[str, ...], needed: str) -> None:
    config, report = compose(*MINIMAL, "run.steps=100", "checkpoint.every=0", *more), Report()
    check_disk(config, 12 * GIB, [GIB // 2, GIB // 2], report, on_this_machine=False)
    assert needed in report.lines[0].text
