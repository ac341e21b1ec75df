"""Tests the prepared folders: geometric response lengths, and prompts of the requested lengths."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.workloads import WORKLOADS, dry, is_prepared, prepare

WORK = replace(dry(WORKLOADS["W2"]), prompts=16, prompt_tokens=(8, 128), new_tokens=256, mean_tokens=48)
STOP = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare(WORK, folder)
    return folder


def test_the_stop_token_has_the_same_probability_everywhere(folder):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 256, (8, 100), generator=generator)
    for dtype, tolerance in ((torch.float32, 0.02), (torch.bfloat16, 0.05)):
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
        with torch.no_grad():
            p = model(ids).logits.float().softmax(-1)
        assert (48 * p[..., STOP] - 1).abs().max() < tolerance
        assert p[..., [0, 2]].max() < 1e-9  # the pad token and the unknown token are never sampled


def test_answers_of_generate_are_geometric(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.manual_seed(0)
    prompts = torch.randint(3, 256, (400, 4))
    drawn = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=256
    )[:, 4:]
    stops = drawn == STOP
    lengths = ((stops.cumsum(1) - stops.long()) == 0).sum(1).float()  # lengths include the stop token
    # a geometric distribution of mean 48 truncated at 256: mean 48 (1 - (47/48)^256) = 47.78, standard
    # deviation 45.8, and 2.29 for the mean of 400 draws; the tolerance is four times that
    assert abs(lengths.mean() - 47.78) < 9.2
    # the share of lengths above 48 is (47/48)^48 = 0.364, +- 4 x 0.024
    assert abs((lengths > 48).float().mean() - 0.364) < 0.097
    assert lengths.min() >= 1 and lengths.max() <= 256


def test_prompts_have_their_lengths_and_are_read_as_they_were_drawn(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    lengths = sorted(len(tokenizer(text)["input_ids"]) for text in texts)
    assert lengths == list(range(8, 129, 8))  # 16 prompts, evenly from 8 to 128
    ids = tokenizer(texts[0])["input_ids"]
    assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids


def test_the_reward_model_is_a_classifier_of_the_same_shape(folder):
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "reward")
    assert reward.config.num_labels == 1
    assert (reward.config.hidden_size, reward.config.num_hidden_layers, reward.config.pad_token_id) == (
        128,
        2,
        0,
    )


def test_a_folder_is_kept_for_the_same_work_only(folder):
    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    prepare(WORK, folder)
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert not is_prepared(replace(WORK, mean_tokens=24), folder)
    assert not is_prepared(WORK, folder, given="elsewhere")


def test_given_weights_keep_their_tokenizer(folder, tmp_path):
    prepare(WORK, tmp_path, given=str(folder / "model"))
    kept, made = (
        AutoModelForCausalLM.from_pretrained(place / "model").state_dict() for place in (tmp_path, folder)
    )
    assert all(torch.equal(kept[name], made[name]) for name in made)
    reward = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert reward.config.num_labels == 1
    # reward model and actor have the same trunk
    assert torch.equal(reward.model.norm.weight, made["model.norm.weight"])
