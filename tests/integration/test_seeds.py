"""Runs the experiments of the tutorials with their own numbers, on tiny models in place of those of the Hub.

Only models, data and the number of steps are replaced; batch sizes, passes, lengths, learning rates and all
options of the algorithms are those of the experiments.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DebertaV2Config,
    GenerationConfig,
    LlamaConfig,
)

from tests.integration.test_presets import metrics, section, together
from tests.rewards.own_code import save_own_code
from tests.rewards.reward_cases import CHAT_TEMPLATE, VOCAB, save_tokenizer
from tests.support.models import SIZES

LLAMA = dict(
    vocab_size=VOCAB, **SIZES, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, pad_token_id=2
)
DEBERTA = dict(
    vocab_size=VOCAB,
    **SIZES,
    max_position_embeddings=512,
    relative_attention=True,
    position_buckets=8,
    pos_att_type=["p2c", "c2p"],
    type_vocab_size=2,
)
STOPS = [1, *range(10, 40)]  # end tokens of a model whose responses have about 8 tokens, to save time
ROWS = 1024  # at least one step of every experiment


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Saves two chat models, reward models (an encoder, a decoder, one with its own code) and prompts."""
    folder = tmp_path_factory.mktemp("stand_ins")
    torch.manual_seed(0)
    for name, auto_class, config in (
        ("brief", AutoModelForCausalLM, LlamaConfig(**LLAMA, initializer_range=0.2)),
        ("talker", AutoModelForCausalLM, LlamaConfig(**LLAMA, initializer_range=0.2)),
        ("decoder", AutoModelForSequenceClassification, LlamaConfig(**LLAMA, num_labels=1)),
        ("encoder", AutoModelForSequenceClassification, DebertaV2Config(**DEBERTA, num_labels=1)),
    ):
        auto_class.from_config(config).save_pretrained(folder / name)
        template = None if name == "encoder" else CHAT_TEMPLATE
        save_tokenizer(folder / name, template=template, cross_encoder=name == "encoder")
    GenerationConfig(eos_token_id=STOPS, pad_token_id=2).save_pretrained(folder / "brief")
    save_own_code(folder / "own_code")
    row = {"conversations": [{"role": "user", "content": "列出五个"}, {"role": "assistant", "content": "空"}]}
    (folder / "chats.jsonl").write_text((json.dumps(row) + "\n") * ROWS)
    return {path.stem: str(path) for path in folder.iterdir()}


ENCODER = ("reward.model.path={encoder}",)
# arguments that replace models and data, and the number of steps if the whole run would take long
CASES: dict[str, tuple[str, ...]] = {
    "zysnlp": ENCODER,
    "sequence_kl": ("data.path={chats}", "run.steps=1", *ENCODER),
    "n_plus": ("data.path={chats}", "run.steps=1", *ENCODER),
    "deepspeed_chat": ("data.path={chats}", "run.steps=1", "reward.model.path={decoder}"),
    "minimind": (
        "data.path={chats}",
        "run.steps=5",
        "reward.parts.model.reward.model.path={own_code}",
        "reward.parts.model.reward.model.trust_remote_code=true",
        "reward.parts.model.reward.model.dtype=fp32",
        "actor.model.path={talker}",
        "actor.model.dtype=fp32",  # shows changes of the policy by a learning rate of 8e-8
    ),
}
# Optimizer steps by hand. zysnlp: 3 passes over 8 prompts x 2 responses, 5 x 16 / 2 per pass, the 120 of the
# tutorial. The others: 4 or 1 passes over one minibatch in each step.
UPDATES = {"zysnlp": 120, "sequence_kl": 4, "n_plus": 4, "deepspeed_chat": 1, "minimind": 5}


@pytest.fixture(scope="module")
def runs(stand_ins, tmp_path_factory, rank_server):
    root = tmp_path_factory.mktemp("seeds")
    cases = {}
    for name, more in CASES.items():
        arguments = [f"+experiment={name}", f"run.dir={root / name}", "actor.model.path={brief}", *more]
        cases[name] = [argument.format(**stand_ins) for argument in arguments]
    return root, together(rank_server, root, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_experiment_runs_with_its_own_numbers(runs, name: str) -> None:
    root, output = runs
    (updates,) = re.findall(r"^optimizer steps: (\d+)$", section(output, name), flags=re.MULTILINE)
    assert int(updates) == UPDATES[name]
    assert (root / name / "model" / "config.json").exists()


@pytest.mark.slow
def test_zysnlp_prints_its_optimizer_steps_and_the_difference_from_the_tutorials_log(runs) -> None:
    output = section(runs[1], "zysnlp")
    lines = re.findall(r"^  optimizer step (\d+): actor loss .*, critic loss .*, KL .* -> .*$", output, re.M)
    assert lines == [str(number) for number in range(1, 41)] * 3
    assert "note       the tutorial's formula gives 120 optimizer steps" in output


@pytest.mark.slow
def test_minimind_renews_its_old_policy_at_the_tutorials_steps(runs) -> None:
    ratios = [line["parity/ratio_first_minibatch_max"] for line in metrics(runs[0] / "minimind")]
    # The copy is made at the end of step 3, so the ratio is 1 in steps 1 and 4 only.
    assert [ratio == pytest.approx(1, abs=1e-7) for ratio in ratios] == [True, False, False, True, False]


@pytest.mark.slow
def test_the_critic_of_deepspeed_chat_starts_from_the_reward_model(runs, stand_ins) -> None:
    (line,) = [line for line in section(runs[1], "deepspeed_chat").splitlines() if "critic  " in line]
    assert "decoder" in line, line
