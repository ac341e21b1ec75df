"""Tests value and reward models on tiny random models of each family.

The independent reference is the forward of transformers on one unpadded prefix at a time.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    MambaConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
)

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.models.value import can_start_critic, load_critic, load_reward_model
from tests.support.models import SIZES, decoders
from tests.support.ports import reserved_port

SMALL = dict(vocab_size=60, **SIZES, initializer_range=0.5)
DECODERS = decoders(60, std=0.5, dropout=0.5)
ENCODERS = {
    "deberta": lambda: DebertaV2Config(
        **SMALL, max_position_embeddings=40, relative_attention=True, position_buckets=8,
        pos_att_type=["p2c", "c2p"], type_vocab_size=2,
        hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5, pooler_dropout=0.5,
    ),
    "roberta": lambda: RobertaConfig(
        **SMALL, max_position_embeddings=40, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5,
    ),
}  # fmt: skip
FAMILIES = DECODERS | ENCODERS
LENGTHS = [(1, 1), (4, 3), (2, 5)]  # lengths of prompt and response


def critic_of(folder, zero_head=True, **changes):
    return load_critic(ModelConfig(path=folder, **{"dtype": "fp32"} | changes), zero_head=zero_head)


def reward_model_of(folder):
    return load_reward_model(ModelConfig(path=folder, dtype="fp32"))


def saved(folder, config, auto_class=AutoModelForSequenceClassification, **changes):
    torch.manual_seed(0)
    config.update({"num_labels": 1} | changes)
    auto_class.from_config(config).save_pretrained(folder)
    return str(folder)


def rows(eos=None):
    """Makes left-padded prompts and three right-padded responses, with arbitrary ids in the padding."""
    torch.manual_seed(1)
    prompt_width, response_width = max(p for p, _ in LENGTHS), max(r for _, r in LENGTHS)
    ids = torch.randint(4, 60, (3, prompt_width + response_width))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, (p, r) in enumerate(LENGTHS):
        mask[i, prompt_width - p : prompt_width + r] = True
        if eos is not None:
            ids[i, prompt_width + r - 1] = eos
    return ids if eos is None else torch.where(mask, ids, eos), mask, response_width


def transformers_score(folder, ids):
    """Scores one unpadded row at its last position.

    With a batch of one and no pad id, transformers reads the last position.
    """
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, 0]


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_scores_are_read_at_the_last_attended_place_also_where_pad_is_eos(tmp_path, family, side):
    folder = saved(tmp_path, DECODERS[family](), pad_token_id=3, eos_token_id=3)
    model = reward_model_of(folder)
    ids, mask, _ = rows(eos=3)
    texts = [row[m] for row, m in zip(ids, mask, strict=True)]
    if side != "both":
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=3, padding_side=side)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(t) for t in texts], batch_first=True, padding_side=side
        )
    alone = torch.stack([transformers_score(folder, text) for text in texts])
    torch.testing.assert_close(model(ids, mask), alone, atol=1e-4, rtol=1e-4)
    assert alone.std() > 0.01


@pytest.mark.parametrize("family", ENCODERS)
def test_encoder_scores_are_the_models_own_logits(tmp_path, family):
    folder = saved(tmp_path, ENCODERS[family]())
    model = reward_model_of(folder)
    reference = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids, mask = torch.randint(4, 60, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    ids[1, 4:] = 1  # RoBERTa derives positions from its own pad id
    with torch.no_grad():
        alone = torch.cat(
            [reference(input_ids=ids[:1]).logits[:, 0], reference(input_ids=ids[1:, :4]).logits[:, 0]]
        )
    torch.testing.assert_close(model(ids, mask), alone, atol=1e-5, rtol=1e-4)


def test_token_types_reach_the_encoder(tmp_path):
    model = reward_model_of(saved(tmp_path, ENCODERS["deberta"]()))
    ids, mask = torch.randint(4, 60, (1, 6)), torch.ones(1, 6, dtype=torch.bool)
    types = torch.tensor([[0, 0, 0, 1, 1, 1]])
    expected = model.model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits[:, 0]
    torch.testing.assert_close(model(ids, mask, token_type_ids=types), expected)
    assert not torch.allclose(model(ids, mask), expected)


@pytest.mark.parametrize("family", DECODERS)
def test_a_language_model_becomes_a_critic_whose_values_are_zero_but_learn(tmp_path, family):
    folder = saved(tmp_path, DECODERS[family](), AutoModelForCausalLM)
    critic = critic_of(folder)
    values = critic(*rows())
    assert values.abs().max() == 0
    (values - 1).square().sum().backward()
    assert critic.model.score.weight.grad.abs().max() > 0
    with pytest.raises(UserError, match="score.weight"):
        critic_of(folder, zero_head=False)


def test_a_trained_head_is_kept(tmp_path):
    folder = saved(tmp_path, DECODERS["llama"]())
    trained = AutoModelForSequenceClassification.from_pretrained(folder).score.weight
    for zero_head in (True, False):
        torch.testing.assert_close(critic_of(folder, zero_head=zero_head).model.score.weight, trained)


def test_the_head_is_in_fp32(tmp_path):
    critic = critic_of(saved(tmp_path, DECODERS["llama"]()), dtype="bf16")
    ids, mask, _ = rows()
    hidden = critic.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert hidden.dtype == critic.model.score.weight.dtype == torch.bfloat16
    expected = hidden.double() @ critic.model.score.weight[0].double()
    torch.testing.assert_close(critic.model.score(hidden)[..., 0].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_than_one_label_is_refused(tmp_path, family):
    folder = saved(tmp_path, FAMILIES[family](), num_labels=2)
    with pytest.raises(UserError, match=r"reward.model.path=.*has 2 labels.*num_labels=1"):
        reward_model_of(folder)
    with pytest.raises(UserError, match="critic.model.path=.*has 2 labels"):
        critic_of(folder)


@pytest.mark.parametrize("family", DECODERS)
def test_a_language_model_is_no_reward_model(tmp_path, family):
    with pytest.raises(UserError, match="reward.model.path=.*no trained score head .score.weight"):
        reward_model_of(saved(tmp_path, DECODERS[family](), AutoModelForCausalLM))


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_without_a_head_are_no_reward_models_and_none_is_a_critic(tmp_path, family):
    with pytest.raises(UserError, match="reward.model.path=.*no trained score head .classifier"):
        reward_model_of(saved(tmp_path / "base", ENCODERS[family](), AutoModel))
    with pytest.raises(UserError, match="critic.model.path=.*needs a value at every token"):
        critic_of(saved(tmp_path / "scorer", ENCODERS[family]()))


def test_a_saved_critic_is_a_sequence_classifier_and_loads_as_one(tmp_path):
    critic = critic_of(saved(tmp_path / "lm", DECODERS["gpt2"](), AutoModelForCausalLM))
    torch.nn.init.normal_(critic.model.score.weight)
    critic.save(tmp_path / "critic")
    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", output_loading_info=True
    )
    assert model.config.num_labels == 1 and not info["missing_keys"] and not info["unexpected_keys"]
    again = critic_of(str(tmp_path / "critic"), zero_head=False)
    torch.testing.assert_close(again(*rows()), critic(*rows()))
    critic.save(
        tmp_path / "zeros", state_dict={k: torch.zeros_like(v) for k, v in critic.model.state_dict().items()}
    )
    assert reward_model_of(str(tmp_path / "zeros"))(*rows()[:2]).abs().max() == 0


def test_gradient_checkpointing_is_active_and_changes_nothing(tmp_path):
    folder = saved(tmp_path, DECODERS["llama"]())
    grads, calls = [], []
    for checkpointing in (False, True):
        critic = critic_of(folder, gradient_checkpointing=checkpointing).train()
        calls.append(0)
        critic.model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_: calls.__setitem__(-1, calls[-1] + 1)
        )
        critic(*rows()).square().sum().backward()
        grads.append(critic.model.model.embed_tokens.weight.grad)
    assert calls == [1, 2]  # with checkpointing, the layer is recomputed in the backward pass
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("family", "limit"), [("llama", 2048), ("gpt2", 1024), ("opt", 64), ("deberta", 40), ("roberta", 38)]
)
def test_the_longest_text(tmp_path, family, limit):
    assert reward_model_of(saved(tmp_path, FAMILIES[family]())).max_tokens == limit


def test_roberta_really_takes_max_tokens(tmp_path):
    model = reward_model_of(saved(tmp_path, ENCODERS["roberta"]()))
    longest = torch.full((1, model.max_tokens), 7)
    assert model(longest, torch.ones_like(longest)).isfinite()
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, model.max_tokens + 1), 7), torch.ones(1, model.max_tokens + 1))


ZERO3 = """
import sys, torch, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
from transformers import AutoModelForCausalLM
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.config.types import replace
from ppo_ds.errors import UserError
from ppo_ds.models.loading import from_pretrained, load_config, refuse_missing
from ppo_ds.models.policy import sharded_loading
from ppo_ds.models.value import load_critic, load_reward_model
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
lm, scorer = (ModelConfig(path=path, dtype="fp32") for path in sys.argv[1:])
ids = torch.arange(4, 12).view(2, 4)
inputs = ids, torch.ones_like(ids), 2

def sharded(load):
    with sharded_loading(config):
        model = load()
    assert all(
        hasattr(p, "ds_id") and p.numel() == 0 for n, p in model.model.base_model.named_parameters()
    ), "not sharded while loading"
    optimizer = torch.optim.SGD([p.requires_grad_() for p in model.parameters()], lr=0.1)
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config | {"zero_allow_untested_optimizer": True}
    )[0]
    assert model.model.score.weight.numel() == 0, "the head is not sharded"
    return engine

critic = sharded(lambda: load_critic(replace(lm, gradient_checkpointing=True), zero_head=True))
values = critic(*inputs)
assert values.abs().max() == 0, values
critic.backward((values - 1).square().sum())
critic.step()
assert critic(*inputs).abs().max() > 0, "the head did not learn"

engine = sharded(lambda: load_reward_model(scorer))
whole = load_reward_model(scorer)
assert whole.model.score.weight.numel() > 0, "the sharded loading outlived its block"
torch.testing.assert_close(engine(*inputs[:2]), whole(*inputs[:2]))

# missing weights are detected here too, and a tied output layer (GPT-2) does not count as missing
with sharded_loading(config):
    refuse_missing(lm.path, from_pretrained(AutoModelForCausalLM, lm, config=load_config(lm.path))[1])
    try:
        load_reward_model(lm)
    except UserError as error:
        assert "no trained score head" in str(error)
    else:
        raise AssertionError("a language model passed as reward model")
print("ok")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_zero3_shards_while_loading_and_keeps_head_and_scores(tmp_path, family):
    folders = (
        saved(tmp_path / "lm", DECODERS[family](), AutoModelForCausalLM),
        saved(tmp_path / "scorer", DECODERS[family]()),
    )
    port = str(reserved_port())
    one_rank = dict(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        DS_ACCELERATOR="cpu",
    )
    env = os.environ | one_rank | dict(PYTHONPATH=str(Path(__file__).parents[2]), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-c", ZERO3, *folders], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "ok" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


def saved_tokenizer(folder, *words):
    vocab = {word: i for i, word in enumerate(["<pad>", "<unk>", *words])}
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>").save_pretrained(
        folder
    )
    return load_tokenizer(str(folder))


OTHERS = {
    "bert": lambda: BertConfig(**SMALL),
    "t5": lambda: T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2),
    "mamba": lambda: MambaConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1
    ),  # transformers has no sequence classifier of this family
}


@pytest.mark.parametrize("family", FAMILIES | OTHERS)
def test_only_decoders_with_the_actors_vocabulary_can_start_its_critic(tmp_path, family):
    """transformers also registers BERT and RoBERTa as causal language models."""
    (FAMILIES | OTHERS)[family]().save_pretrained(tmp_path / "rm")
    own = saved_tokenizer(tmp_path / "rm", "a", "b")
    rm = ModelConfig(path=str(tmp_path / "rm"))
    assert can_start_critic(rm, own) is (family in DECODERS)
    other = saved_tokenizer(tmp_path / "actor", "a", "c")
    assert not can_start_critic(rm, other)
