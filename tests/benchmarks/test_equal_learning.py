"""Tests the comparison of learning: its measurements by hand, the reward given to TRL, the whole command.

The command is run without TRL, unless $TRL_PYTHON names the Python of an environment with it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks.equal_learning import (
    CHAIN_SUM,
    GRPO,
    PPO,
    QUICK,
    REAL,
    best_score,
    complete,
    correct,
    expected_score,
    kl_and_length,
    prepare_chain_sum,
    table,
)
from benchmarks.equal_learning_ours import overrides
from benchmarks.equal_learning_trl import grpo_arguments, last_number, ppo_arguments, reward_model, score
from launch.cli import load_config
from ppo_ds.examples import sums
from ppo_ds.models import tiny
from ppo_ds.rewards.rules import NumericReward
from tests.support.environment import ROOT, run_python

ROWS = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "12+30=", "answer": "42"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.character_tokenizer(sums.CHARACTERS)


@pytest.fixture(scope="module")
def models(tokenizer):
    """Returns a policy that samples every token with the same probability, and a random initial policy."""
    torch.manual_seed(0)
    policy, initial = (
        tiny.tiny_llama(tokenizer, hidden_size=16, layers=1, heads=2, max_tokens=32).eval() for _ in range(2)
    )
    policy.lm_head.weight.data.zero_()
    initial.lm_head.weight.data.mul_(20)  # far from uniform
    return policy, initial


def test_the_expected_score_is_the_probability_of_the_answer_and_the_end_token(models, tokenizer) -> None:
    p = 1 / tokenizer.vocab_size
    assert expected_score(models[0], tokenizer, ROWS) == pytest.approx((p**2 + p**3) / 2)


def test_the_kl_of_one_token_is_that_of_the_two_distributions(models, tokenizer) -> None:
    policy, initial = models
    by_hand = []
    for row in ROWS:
        ids = torch.tensor(tokenizer.encode_many([row["prompt"]], True))
        with torch.no_grad():
            q = initial(input_ids=ids).logits[0, -1].double().softmax(-1)
        p = 1 / tokenizer.vocab_size
        by_hand.append(sum(p * (torch.tensor(p).log() - each.log()) for each in q).item())
    kl, length = kl_and_length(policy, initial, tokenizer, ROWS, samples=3, new_tokens=1)
    assert kl == pytest.approx(sum(by_hand) / 2, rel=1e-5) and kl > 0.05
    assert length == 1


def test_positions_after_the_end_token_do_not_count(models, tokenizer) -> None:
    policy, initial = models
    prompt, stop = tokenizer.encode_many(["1+2="], True)[0], tokenizer.stop_ids[0]
    found = []
    for rest in ([stop], [stop, tokenizer.pad_id, tokenizer.pad_id], [stop, 7, 7]):
        drawn = torch.tensor([[*prompt, 6, *rest]])
        fixed = Fixed(policy, drawn)
        found.append(kl_and_length(fixed, initial, tokenizer, ROWS[:1], samples=1, new_tokens=4))
    assert found[0] == pytest.approx(found[1]) and found[0] == pytest.approx(found[2])
    assert found[0][1] == 2


class Fixed:
    """A policy whose sampled responses are given."""

    def __init__(self, model, drawn):
        self.model, self.drawn = model, drawn

    def __call__(self, **inputs):
        return self.model(**inputs)

    def generate(self, **_options):
        return self.drawn


@pytest.mark.parametrize("response", ["42", "43", "", "042", "42=", "4242", "+", "12+30=42"])
def test_trl_gets_the_reward_of_the_quickstart(response: str, tokenizer) -> None:
    """The module is called as TRL does: left-padded prompt, end token, padding, hidden states, then score."""
    expected = sums.reward([ROWS[1]["prompt"]], [response], [ROWS[1]])[0]
    assert score(ROWS[1]["prompt"] + response) == expected
    text = tokenizer.encode_many([ROWS[1]["prompt"] + response], True)[0]
    ids = torch.tensor([[tokenizer.pad_id] * 2 + text + [tokenizer.stop_ids[0], tokenizer.pad_id]])
    model = reward_model(tokenizer.hf)
    output = model.model(input_ids=ids, attention_mask=ids != tokenizer.pad_id, position_ids=None)
    logits = model.score(output.hidden_states[-1])
    assert logits.shape == (*ids.shape, 1) and logits[0, -2, 0] == expected


@pytest.mark.parametrize("settings", [PPO, GRPO, REAL], ids=["ppo", "grpo", "chat model"])
def test_this_trainer_gets_the_settings(settings, models, tokenizer, tmp_path: Path) -> None:
    for name in ("model", "critic"):
        tiny.save(models[1], tokenizer, tmp_path / name)
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    folders = {"folder": str(tmp_path), "run_dir": str(tmp_path)}
    values = json.loads(json.dumps(folders | vars(settings) | {"seed": 3}))
    config = load_config(overrides(values))
    assert (config.run.seed, config.run.steps, config.algo.epochs) == (3, settings.steps, settings.epochs)
    responses = settings.prompts * settings.samples
    assert config.rollout.prompts_per_step * config.rollout.samples_per_prompt == responses
    assert config.algo.minibatch_size == responses  # one optimizer step per pass, as TRL has by default
    assert config.actor.model.dtype == settings.dtype
    optimizers = [config.actor.optim] + ([config.critic.optim] if settings.algorithm == "ppo" else [])
    for optim in optimizers:
        assert (optim.lr, tuple(optim.betas), optim.eps) == (settings.lr, settings.betas, settings.eps)
        assert (optim.schedule, optim.warmup_steps, optim.grad_clip) == ("constant", 0, settings.grad_clip)
    if settings.algorithm == "ppo":  # the defaults of TRL's PPOConfig
        assert (config.algo.kl.place, config.algo.kl.estimator, config.algo.kl.coef) == ("reward", "k1", 0.05)
        assert (config.algo.gae.gamma, config.algo.gae.lam, config.algo.value.coef) == (1.0, 0.95, 0.1)
        assert (config.algo.policy.clip_low, config.algo.value.clip, config.algo.epochs) == (0.2, 0.2, 4)


def test_trl_gets_the_settings() -> None:
    shared = {
        "output_dir": "scratch",
        "use_cpu": True,
        "seed": 3,
        "per_device_train_batch_size": 256,  # one optimizer step per pass
        "gradient_accumulation_steps": 1,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
    }
    assert ppo_arguments(vars(PPO) | {"seed": 3}, "scratch") == shared | {
        "total_episodes": 60 * 256,
        "num_ppo_epochs": 4,
        "num_mini_batches": 1,
        "kl_coef": 0.05,
        "response_length": 8,
        "stop_token": "eos",
        "local_rollout_forward_batch_size": 256,
        "num_sample_generations": 0,
    }
    assert grpo_arguments(vars(GRPO) | {"seed": 3}, "scratch") == shared | {
        "max_steps": 200,
        "max_grad_norm": 1.0,
        "num_generations": 8,
        "num_iterations": 1,
        "max_completion_length": 8,
        "beta": 0.04,
        "loss_type": "grpo",
        "use_bias_correction_kl": False,
    }


def test_trl_gets_the_dtype_of_a_chat_model() -> None:
    assert grpo_arguments(vars(REAL), "scratch")["bf16"] is True


@pytest.mark.parametrize("response", ["It is -3.", "8 - 5 = 3", "", "no", "-3", "3 and -3!", "It is 3"])
def test_trl_gets_the_numeric_reward(response: str) -> None:
    reward = NumericReward(tokenizer=None)
    assert (last_number(response) == -3) == reward.matches(response, {"answer": "-3"})


def test_greedy_responses_are_judged_by_their_last_number(models, tokenizer) -> None:
    prompt = tokenizer.encode_many(["1+2="], True)[0]
    drawn = [tokenizer.encode_many([text], False)[0] for text in ("1+3", "4+2")]
    policy = Fixed(models[0], torch.tensor([[*prompt, *ids] for ids in drawn]))
    rows = [{"prompt": "1+2=", "answer": answer} for answer in ("3", "3")]
    assert correct(policy, tokenizer, rows, new_tokens=3) == 1


def test_the_questions_of_a_chat_model_are_rendered_and_held_out(tokenizer, models, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    tokenizer.hf.chat_template = "{{ messages[0]['content'] }}!"
    tiny.save(models[1], tokenizer, tmp_path / "model")
    tokenizer.hf.chat_template = None
    prepare_chain_sum(tmp_path / "start", tmp_path / "model", **CHAIN_SUM.task)
    train, heldout = (
        [json.loads(line) for line in (tmp_path / "start" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert len(train) == 100 and not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    for row in train + heldout:
        assert eval(row["prompt"].partition(": ")[2].removesuffix(" =!")) == int(row["answer"])
    assert (tmp_path / "start" / "model" / "config.json").exists()


def write_run(folder: Path, trainer: str, seed: int, **changed) -> Path:
    """Writes the files by which a complete run of --quick is known."""
    run_dir = folder / f"ppo_{trainer}_{seed}"
    run_dir.mkdir(parents=True)
    values = {
        "folder": "start",
        "run_dir": str(run_dir),
        **vars(QUICK.settings[0]),
        "seed": seed,
        **QUICK.task,
    }
    (run_dir / "settings.json").write_text(json.dumps(values | changed))
    (run_dir / "clock.json").write_text("{}")
    return run_dir


def test_results_have_all_complete_runs_with_equal_settings(tmp_path: Path) -> None:
    for trainer, seed in (("trl", 1), ("ours", 10), ("ours", 2)):
        write_run(tmp_path, trainer, seed)
    write_run(tmp_path, "ours", 3, steps=60)
    (write_run(tmp_path, "ours", 4) / "clock.json").unlink()
    found = complete(tmp_path, QUICK)
    assert [run_dir.name for run_dir, _, _ in found] == ["ppo_ours_2", "ppo_ours_10", "ppo_trl_1"]
    assert [(settings.seed, settings.steps) for _, settings, _ in found] == [(2, 2), (10, 2), (1, 2)]


def test_scores_are_compared_within_a_kl() -> None:
    points = [{"kl": kl, "score": score} for kl, score in ((0.0, 0.2), (0.6, 0.1), (0.1, 0.5), (0.3, 0.8))]
    assert [best_score(points, kl) for kl in (0.0, 0.1, 0.2, 0.3, 1.0)] == [0.2, 0.5, 0.5, 0.8, 0.8]


def test_the_table_has_mean_and_range_over_the_seeds() -> None:
    def run(trainer: str, last: float) -> dict:
        end = {"kl": 0.5, "score": last, "seconds": 2.0, "cpu_seconds": 1.0}
        return {"trainer": trainer, "points": [{"kl": 0.0, "score": 0.1, "seconds": 0.0}, end]}

    lines = table([run("ours", 0.4), run("ours", 0.8), run("trl", 0.2)])
    assert lines[0] == "| | ppo_ds | TRL |"
    assert (
        lines[3] == "| best score at a KL of at most 0.4 | 0.100 (0.100 to 0.100) | 0.100 (0.100 to 0.100) |"
    )
    assert (
        lines[4] == "| best score at a KL of at most 0.6 | 0.600 (0.400 to 0.800) | 0.200 (0.200 to 0.200) |"
    )
    assert lines[-1] == "| CPU seconds of training | 1 (1 to 1) | 1 (1 to 1) |"


@pytest.mark.slow
def test_the_command_trains_measures_and_draws(tmp_path: Path) -> None:
    study = tmp_path / "study"
    script = str(ROOT / "benchmarks" / "equal_learning.py")
    command = [script, "--quick", "--seeds", "0", "--folder", str(study)]
    trainers = ["ours"]
    if trl := os.environ.get("TRL_PYTHON"):
        command, trainers = [*command, "--trl-python", trl], ["ours", "trl"]
    done = run_python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((study / "results.json").read_text())["runs"]
    assert [(run["algorithm"], run["trainer"]) for run in runs] == [
        (algorithm, trainer) for algorithm in ("ppo", "grpo") for trainer in trainers
    ]
    for run in runs:
        assert [point["step"] for point in run["points"]] == [0, 1, 2]
        assert run["points"][0]["kl"] == pytest.approx(0, abs=1e-6)
        # the policies need not change: if all scores of a tiny rollout are 0, so are the advantages
        assert all(0 < point["score"] < 1 for point in run["points"])
        assert [point["seconds"] for point in run["points"]] == sorted(p["seconds"] for p in run["points"])
    for algorithm in ("ppo", "grpo"):
        assert (study / f"equal_learning_{algorithm}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
