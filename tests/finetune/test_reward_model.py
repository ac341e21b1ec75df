"""Tests the loss, the scores and the exported model of the reward-model stage, without DeepSpeed.

The independent references are transformers' own classifiers and the formula of RewardTrainer in TRL 1.16.0.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.data.preferences import padding_token
from ppo_ds.errors import UserError
from ppo_ds.finetune.pair_scores import PairScores, pair_plan
from ppo_ds.models.lora import add_adapters
from ppo_ds.models.value import expect_reward_model
from tests.data.conftest import make_tokenizer
from tests.finetune.preference_cases import (
    ENCODERS,
    GPT2,
    LLAMA,
    gradients,
    losses,
    rows,
    save_lm,
    scorer_of,
    source_of,
    write,
)
from tests.rewards.model_cases import Build


@pytest.fixture
def tokenizer():
    return make_tokenizer(adds_bos=True)


@pytest.fixture
def case(tmp_path, tokenizer):
    """Returns a new scorer and 7 pairs with margins."""

    def make(config=LLAMA):
        folder = save_lm(tmp_path / "lm", config, tokenizer)
        path = write(tmp_path / "pairs.jsonl", rows(5, margin=0.3) + rows(2, seed=1))
        return scorer_of(folder), source_of(path, tokenizer).batch(range(7))

    return make


def save(scorer, folder, tokenizer, source, **settings):
    """Exports a scorer as the stage does."""
    pad_id = padding_token(tokenizer, [source]) if scorer.is_decoder else tokenizer.pad_id
    scorer.save(folder, settings={"score_template": source.template, **settings}, pad_id=pad_id)
    tokenizer.with_padding(pad_id).save(folder)
    return str(folder)


# -- loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, *ENCODERS.values()], ids=lambda config: config.model_type)
def test_loss_and_gradients_are_those_of_trl(case, tmp_path, tokenizer, config):
    """Compares with the formula of TRL 1.16.0 (RewardTrainer.compute_loss), written down here.

    It is applied to the scores of transformers' classifier, with the whole batch in one padded forward.
    """
    scorer, pairs = case(config)
    scorer.save(tmp_path / "rm", pad_id=1)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    ids, mask = pairs.ids.transpose(0, 1).flatten(0, 1), pairs.mask.transpose(0, 1).flatten(0, 1)
    ids = ids.masked_fill(~mask, 1)
    chosen, rejected = plain(input_ids=ids, attention_mask=mask.long()).logits.squeeze(1).chunk(2)
    theirs = -torch.nn.functional.logsigmoid(chosen - rejected - pairs.margins).mean()
    theirs = theirs + 0.01 * torch.mean((chosen + rejected) ** 2)
    ours = losses(scorer, pairs, budget=60, ranks=2)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    mine, other = gradients(scorer, ours), gradients(plain, theirs)
    assert mine.keys() == {f"model.{name}" for name in other} and len(mine) > 5
    for name, gradient in other.items():
        torch.testing.assert_close(mine[f"model.{name}"], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "budget", "packed"),
    [(1, 1, False), (2, 40, False), (3, 70, False), (2, 60, True), (4, 1, True)],
)
def test_ranks_micro_batches_and_packing_change_nothing(case, ranks, budget, packed):
    scorer, pairs = case()
    whole = gradients(scorer, losses(scorer, pairs))
    parts = gradients(scorer, losses(scorer, pairs, ranks=ranks, budget=budget, packed=packed))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-6, rtol=1e-5)


def test_options_of_the_loss_reach_it(case):
    scorer, pairs = case()
    values = [
        float(losses(scorer, pairs, **settings).detach())
        for settings in ({}, {"margin": False}, {"centering": 0.0}, {"label_smoothing": 0.2})
    ]
    assert len(set(values)) == 4


def test_both_texts_of_a_pair_are_in_one_forward_of_at_most_the_budget(case):
    _, pairs = case()
    full = pairs.filled(2)
    assert len(full) == 8 and full.counted.tolist() == [True] * 7 + [False]
    for packed in (False, True):
        plans = [pair_plan(full, 40, SimpleNamespace(rank=rank, size=2), packed) for rank in (0, 1)]
        assert len(plans[0]) == len(plans[1]) > 1
        assert sorted(torch.cat(plans[0] + plans[1]).tolist()) == list(range(8))
        for part in plans[0] + plans[1]:
            lengths = full.lengths[part]
            tokens = int(lengths.sum()) if packed else 2 * len(part) * int(lengths.max())
            assert tokens <= 40 or len(part) == 1


# -- the model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, GPT2, *ENCODERS.values()], ids=lambda config: config.model_type)
def test_the_exported_folder_gives_the_scores_in_plain_transformers(tmp_path, tokenizer, config):
    """The text is prompt + " " + chosen; batches are padded by the exported tokenizer."""
    scorer = scorer_of(save_lm(tmp_path / "lm", config, tokenizer))
    lines = rows(6)
    source = source_of(write(tmp_path / "pairs.jsonl", lines), tokenizer)
    folder = save(scorer, tmp_path / "rm", tokenizer, source)
    batch = source.batch(range(6))
    with torch.no_grad():
        scores = scorer(batch.ids[:, 0], batch.mask[:, 0])
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)(
        [row["prompt"] + " " + row["chosen"] for row in lines], padding=True, return_tensors="pt"
    )
    assert plain.num_labels == 1 and not bool(inputs["attention_mask"].all())
    with torch.no_grad():
        torch.testing.assert_close(plain(**inputs).logits[:, 0], scores, atol=1e-5, rtol=1e-5)
    assert scores.std() > 0.01


@pytest.mark.parametrize("pad", [None, "<eos>", "<pad>"])
def test_a_text_that_ends_with_the_pad_token_is_read_at_its_last_token(tmp_path, pad):
    """The chat template ends every text with <eos>, which is also the pad token."""
    tokenizer = make_tokenizer(pad=pad, adds_bos=True)
    scorer = scorer_of(save_lm(tmp_path / "lm", LLAMA, tokenizer))
    source = source_of(write(tmp_path / "pairs.jsonl", rows(6)), tokenizer, apply_chat_template=True)
    folder = save(scorer, tmp_path / "rm", tokenizer, source)
    batch = source.batch(range(6))
    with torch.no_grad():
        scores = scorer(batch.ids[:, 0], batch.mask[:, 0])
    plain, own = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert plain.config.pad_token_id == own.pad_token_id != 0 and own.get_vocab() == tokenizer.hf.get_vocab()
    for side in ("right", "left"):
        inputs = own(
            [source.texts(i)[0] for i in range(6)],
            add_special_tokens=False,
            padding=True,
            padding_side=side,
            return_tensors="pt",
        )
        with torch.no_grad():
            found = plain(**inputs).logits[:, 0]
        torch.testing.assert_close(found, scores, atol=1e-4, rtol=1e-4)


def test_a_new_head_depends_on_the_seed_only_and_a_trained_one_is_kept(tmp_path, tokenizer):
    folder = save_lm(tmp_path / "lm", LLAMA, tokenizer)
    torch.manual_seed(1)
    first, zero = scorer_of(folder), scorer_of(folder, head_init="zero")
    torch.manual_seed(2)
    again, other = scorer_of(folder), scorer_of(folder, seed=1)
    heads = [scorer.model.score.weight for scorer in (first, again, other)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert first.new_head and 0.5 < float(heads[0].std()) * 17**0.5 < 2 and not zero.model.score.weight.any()
    first.save(tmp_path / "rm", pad_id=1)
    tokenizer.save(tmp_path / "rm")
    kept = scorer_of(tmp_path / "rm", head_init="zero", seed=5)
    assert not kept.new_head and torch.equal(kept.model.score.weight, heads[0])


def test_a_head_of_an_encoder_starts_as_configured_and_is_trained_beside_adapters(tmp_path, tokenizer):
    folder = save_lm(tmp_path / "lm", ENCODERS["roberta"], tokenizer)
    zero = scorer_of(folder, head_init="zero").model.classifier
    assert not zero.out_proj.weight.any() and not zero.out_proj.bias.any() and bool(zero.dense.weight.any())
    scorer = scorer_of(folder)
    assert 0.4 < float(scorer.model.classifier.out_proj.weight.std()) * 17**0.5 < 2
    add_adapters(scorer.model, rank=2, alpha=4.0, targets=None, seed=0, key="scorer.lora")
    trained = {name for name, p in scorer.model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora" not in name} == {
        f"classifier.{layer}.{kind}" for layer in ("dense", "out_proj") for kind in ("weight", "bias")
    }
    assert not any("classifier" in name and "lora" in name for name in trained)


# -- PPO's reward --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, ENCODERS["bert"]], ids=lambda config: config.model_type)
@pytest.mark.parametrize("chat", [False, True])
def test_ppos_reward_scores_the_text_of_the_training(tmp_path, tokenizer, config, chat):
    scorer = scorer_of(save_lm(tmp_path / "lm", config, tokenizer))
    lines = rows(4) + [{"prompt": "ab\n", "chosen": "x", "rejected": " u"}]
    source = source_of(write(tmp_path / "pairs.jsonl", lines), tokenizer, apply_chat_template=chat)
    folder = save(scorer, tmp_path / "rm", tokenizer, source, score_mean=0.25, score_std=0.5)
    batch = source.batch(range(5))
    with torch.no_grad():
        scores = scorer(batch.ids.flatten(0, 1), batch.mask.flatten(0, 1)).view(5, 2)
    for settings, expected in (({}, scores), ({"normalize": True}, (scores - 0.25) / 0.5)):
        reward = Build(tokenizer)(folder, **settings)
        # PPO's rows of a tokenizer with a chat template: the prompt is a user's message
        data = [
            {
                "prompt_text": tokenizer.render_chat([{"role": "user", "content": line["prompt"]}]),
                "messages": [{"role": "user", "content": line["prompt"]}],
            }
            for line in lines
        ]
        if not chat:  # and of data.apply_chat_template=false
            data[0] = {"prompt_text": lines[0]["prompt"]}
        for side, name in enumerate(("chosen", "rejected")):
            texts = [reward.encode(row, line[name], True) for row, line in zip(data, lines, strict=True)]
            responses = SimpleNamespace(
                rows=data, texts=[line[name] for line in lines], finished=[True, False, True, False, True]
            )
            assert texts[0].ids == batch.ids[0, side][batch.mask[0, side]].tolist()
            found = reward.score_responses(responses)
            torch.testing.assert_close(found, expected[:, side], atol=1e-5, rtol=1e-5)


def test_normalize_needs_the_statistics_of_the_stage(tmp_path, tokenizer):
    scorer = scorer_of(save_lm(tmp_path / "lm", LLAMA, tokenizer))
    source = source_of(write(tmp_path / "pairs.jsonl", rows(2)), tokenizer)
    folder = save(scorer, tmp_path / "rm", tokenizer, source)
    with pytest.raises(UserError, match="reward.normalize=true: config.json of .* has no score_mean"):
        Build(tokenizer)(folder, normalize=True)
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    (tmp_path / "rm" / "config.json").write_text(json.dumps(config | {"score_mean": 1, "score_std": 0.0}))
    record = expect_reward_model(ModelConfig(path=folder))[2]
    assert (record.template, record.mean, record.std) == ("text", None, None)  # a deviation of 0 is not used


# -- evaluation ----------------------------------------------------------------------------------------------


def test_metrics_of_scores_by_hand():
    scores = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    found = PairScores(scores, torch.tensor([[4, 2], [3, 3], [2, 3], [5, 2]]), ["a", None, "b", "b"])
    metrics = found.metrics()
    assert metrics["eval/accuracy"] == 2.5 / 4  # a tie counts as half
    assert (metrics["eval/accuracy/a"], metrics["eval/accuracy/b"]) == (1.0, 0.5)
    assert metrics["eval/ties"] == 0.25 and metrics["eval/margin_mean"] == 1.0
    assert metrics["eval/margin_p50"] == 1.0 and metrics["eval/score_mean"] == 1.0
    d = torch.tensor([2.0, 0.0, -1.0, 3.0])
    assert metrics["eval/loss"] == pytest.approx(float(torch.log1p(torch.exp(-d)).mean()), rel=1e-6)
    # confidences 0.5, 0.731, 0.881 and 0.953 fall into different bins
    confidence, correct = d.abs().sigmoid(), torch.tensor([1.0, 0.5, 0.0, 1.0])
    assert metrics["eval/calibration_error"] == pytest.approx(float((confidence - correct).abs().mean()))
    assert metrics["eval/length_corr"] == pytest.approx(
        float(torch.corrcoef(torch.stack([scores.flatten(), found.lengths.flatten().float()]))[0, 1])
    )
