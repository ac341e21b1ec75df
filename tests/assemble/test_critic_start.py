"""Tests that the critic of PPO starts from a reward model that the stage reward_model has trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from ppo_ds.assemble.roles import critic_module, critic_start
from ppo_ds.config.schema import Config
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.models.value import ScoreModel, load_scorer
from tests.config.commands import MINIMAL, compose

IDS = torch.tensor([[3, 4, 5, 6], [6, 5, 4, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()


def base(folder: Path, characters: str = "abcd") -> Path:
    tokenizer = tiny.character_tokenizer(characters)
    torch.manual_seed(0)
    tiny.save(tiny.tiny_llama(tokenizer, hidden_size=16, layers=1, heads=2, max_tokens=16), tokenizer, folder)
    return folder


def trained(model: Path, folder: Path, *, pad_id: int | None) -> ScoreModel:
    """Writes a reward model as the stage does at the end of a run."""
    tokenizer = load_tokenizer(str(model))
    scorer = load_scorer(ModelConfig(path=str(model), dtype="fp32"), head_init="normal", seed=0)
    scorer.save(folder, settings={"score_mean": 0.5, "score_std": 2.0}, pad_id=pad_id)
    (tokenizer if pad_id is None else tokenizer.with_padding(pad_id)).save(folder)
    return scorer


def config(actor: Path, reward: Path, *more: str) -> tuple[Config, Tokenizer]:
    model = [f"actor.model.path={actor}", "actor.model.dtype=fp32"]
    chosen = ["reward=model", f"reward.model.path={reward}", "reward.model.dtype=fp32"]
    return compose(*MINIMAL[3:], *model, *chosen, *more), load_tokenizer(str(actor))


@pytest.mark.parametrize("pad_id", [0, 1, 2])  # <pad>, <eos>, <unk>: a token that the vocabulary has
def test_the_critic_starts_from_the_trained_reward_model(tmp_path: Path, pad_id: int) -> None:
    actor = base(tmp_path / "sft")
    scorer = trained(base(tmp_path / "base"), tmp_path / "rm", pad_id=pad_id)
    settings, tokenizer = config(actor, tmp_path / "rm", "reward.normalize=true")
    start = critic_start(settings, tokenizer)
    assert (start.model.path, start.zero_head) == (str(tmp_path / "rm"), False)
    critic = critic_module(settings, start)
    for name, weight in scorer.model.state_dict().items():
        assert torch.equal(critic.model.state_dict()[name], weight), name
    with torch.no_grad():
        scores, values = scorer.scores(IDS, MASK), critic(IDS, MASK, IDS.shape[1] - 1)
    # the value at the last token of a text is its score
    last = MASK.sum(1) - 1
    assert torch.allclose(values[torch.arange(2), last], scores, atol=1e-6)


def test_the_critic_starts_from_the_actor_if_the_vocabularies_differ(tmp_path: Path) -> None:
    actor = base(tmp_path / "sft", "dcba")
    trained(base(tmp_path / "base"), tmp_path / "rm", pad_id=0)
    settings, tokenizer = config(actor, tmp_path / "rm")
    start = critic_start(settings, tokenizer)
    assert (start.model.path, start.zero_head) == (str(actor), True)
    with pytest.raises(UserError, match="^critic.init=reward: .*/rm is not a decoder with the actor's voc"):
        critic_start(config(actor, tmp_path / "rm", "critic.init=reward")[0], tokenizer)


def test_an_encoder_cannot_start_a_critic(tmp_path: Path) -> None:
    actor, folder = base(tmp_path / "sft"), tmp_path / "bert"
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    tokenizer = load_tokenizer(str(actor))
    BertForMaskedLM(BertConfig(vocab_size=tokenizer.vocab_size, **sizes)).save_pretrained(folder)
    tokenizer.save(folder)
    trained(folder, tmp_path / "rm", pad_id=0)
    assert critic_start(config(actor, tmp_path / "rm")[0], tokenizer).model.path == str(actor)
