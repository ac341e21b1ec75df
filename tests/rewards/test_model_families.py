"""Tests families of reward models whose tokenizer differs from the actor's.

The expected scores come from transformers on one unpadded text at a time.
"""

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
)

from ppo_ds.models.tokenizer import load_tokenizer
from tests.rewards.model_cases import by_hand
from tests.rewards.reward_cases import make_rollout, save_tokenizer
from tests.support.models import SIZES

ENDOFTEXT, START, END, ACTOR_USER, ACTOR_BOT = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|bot|>",
)
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
ACTORS = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] != 'assistant' else "
    "'<|bot|>' }}{{ m['content'] }}{% endfor %}<|bot|>"
)
FIRST_BYTE = 7  # the first id after the special tokens
VOCAB = FIRST_BYTE + 256


def save_other_tokenizer(folder, *, pad=ENDOFTEXT, template=CHATML, pairs=False, types=False):
    """Saves a tokenizer whose byte ids differ from the actor's, so that the actor's ids are meaningless."""
    tokens = [
        ENDOFTEXT,
        START,
        END,
        "<s>",
        "</s>",
        ACTOR_USER,
        ACTOR_BOT,
        *sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True),
    ]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if pairs:  # as RoBERTa and DeBERTa
        ends = [("<s>", 3), ("</s>", 4)]
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ends
        )
        names = ["input_ids", *["token_type_ids"] * types, "attention_mask"]
        ends = dict(cls_token="<s>", sep_token="</s>", eos_token="</s>", model_input_names=names)
        hf = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, **ends)
    else:
        special = [START, END, ACTOR_USER, ACTOR_BOT]
        hf = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=END, pad_token=pad, additional_special_tokens=special
        )
        hf.chat_template = template
    hf.save_pretrained(folder)
    return str(folder)


WIDE = dict(vocab_size=VOCAB, **SIZES, initializer_range=0.5, num_labels=1)
DECODER = WIDE | dict(num_key_value_heads=1, head_dim=8, pad_token_id=0, bos_token_id=None, eos_token_id=2)
V3 = dict(
    relative_attention=True,
    position_buckets=8,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type=["p2c", "c2p"],
)
DECODERS = {
    "llama": lambda: LlamaConfig(**DECODER),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in DECODER.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**DECODER),
    "gemma2": lambda: Gemma2Config(**DECODER, query_pre_attn_scalar=8),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=256,
        initializer_range=0.5,
        num_labels=1,
        pad_token_id=0,
    ),
}
ENCODERS = {
    "deberta_v2": lambda: DebertaV2Config(
        **WIDE,
        **V3,
        position_biased_input=False,
        conv_kernel_size=3,
        conv_act="gelu",
        type_vocab_size=0,
        pad_token_id=0,
    ),
    "deberta_v3": lambda: DebertaV2Config(
        **WIDE, **V3, position_biased_input=False, type_vocab_size=0, pad_token_id=0
    ),
    "roberta": lambda: RobertaConfig(**WIDE, max_position_embeddings=300, type_vocab_size=1, pad_token_id=0),
    "bert": lambda: BertConfig(**WIDE, type_vocab_size=2, pad_token_id=0),
    "modernbert": lambda: ModernBertConfig(
        **WIDE, pad_token_id=0, global_attn_every_n_layers=2, local_attention=8, classifier_bias=True
    ),
}
CHATS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And a rather longer question?"},
    ],
    [{"role": "user", "content": "你好"}],
]
RESPONSES = ["yo", "", "a longer answer"]


def save_other(folder, config, **tokenizer):
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return save_other_tokenizer(folder, **tokenizer)


@pytest.fixture
def tokenizer(tmp_path):
    """The actor's tokenizer; its chat markup consists of special tokens, which decoding removes."""
    save_tokenizer(tmp_path / "actor", template=ACTORS)
    tokenizer = load_tokenizer(str(tmp_path / "actor"))
    tokenizer.hf.add_special_tokens({"additional_special_tokens": [ACTOR_USER, ACTOR_BOT]})
    return tokenizer


@pytest.fixture
def rollout(tokenizer):
    prompts = [tokenizer.render_chat(chat) for chat in CHATS]
    return make_rollout(
        tokenizer,
        list(zip(prompts, RESPONSES, strict=True)),
        [{"messages": chat} for chat in CHATS],
        [True, True, False],
    )


def bytes_as_ids(text):
    order = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    return [
        FIRST_BYTE + order.index(letter)
        for letter, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
            text
        )
        for letter in letter
    ]


def chatml(chat, response):
    """Returns the ids that the reward model must get; each markup token is one id."""
    ids = []
    for message in [*chat, {"role": "assistant", "content": response}]:
        ids += [1, *bytes_as_ids(f"{message['role']}\n{message['content']}"), 2, *bytes_as_ids("\n")]
    return ids


@pytest.mark.parametrize("pad", [ENDOFTEXT, END], ids=["pad", "pad_is_eos"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_get_the_chat_in_their_own_template(tmp_path, build, rollout, family, pad):
    path = save_other(tmp_path / "rm", DECODERS[family](), pad=pad)
    together = build(path)(rollout).total
    # some rows share a batch, and so are padded
    assert sum(rows for rows, _ in build.placed.batches) == 3 and build.placed.batches[-1][0] > 1
    alone = torch.cat([build(path)(rollout.select(torch.tensor([i]))).total for i in range(3)])
    texts = [chatml(chat, response) for chat, response in zip(CHATS, RESPONSES, strict=True)]
    own = torch.stack([by_hand(path, ids) for ids in texts])
    torch.testing.assert_close(together, own, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(alone, own, atol=1e-4, rtol=1e-4)
    assert own.std() > 0.01


@pytest.mark.parametrize("family", DECODERS)
def test_a_finished_response_ends_with_the_end_token_even_if_that_is_the_pad_token(
    tmp_path, build, rollout, family
):
    """Without a chat template the score is read at the end token, even if this is also the pad token."""
    path = save_other(tmp_path / "rm", DECODERS[family](), pad=END, template=None)
    scores = build(path)(rollout).total
    # the texts do not contain the actor's markup
    said = ["\n".join(message["content"] for message in chat) for chat in CHATS]
    own = AutoTokenizer.from_pretrained(path)
    texts = [
        own(f"{prompt}\n{response}")["input_ids"] for prompt, response in zip(said, RESPONSES, strict=True)
    ]
    ended = [[*texts[0], 2], [*texts[1], 2], texts[2]]
    torch.testing.assert_close(
        scores, torch.stack([by_hand(path, ids) for ids in ended]), atol=1e-4, rtol=1e-4
    )
    # the score is not read at the token before it
    assert (scores[:2] - torch.stack([by_hand(path, ids) for ids in texts[:2]])).abs().min() > 1e-3


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_get_prompt_and_response_as_a_pair(tmp_path, build, rollout, family):
    path = save_other(tmp_path / "rm", ENCODERS[family](), pairs=True, types=family == "bert")
    together = build(path)(rollout).total
    assert build.placed.batches[0][0] == 3
    alone = torch.cat([build(path)(rollout.select(torch.tensor([i]))).total for i in range(3)])
    said = ["\n".join(message["content"] for message in chat) for chat in CHATS]
    own = []
    for prompt, response in zip(said, RESPONSES, strict=True):
        first, second = bytes_as_ids(prompt), bytes_as_ids(response)
        types = (
            {"token_type_ids": [0] * (len(first) + 2) + [1] * (len(second) + 1)} if family == "bert" else {}
        )
        own.append(by_hand(path, [3, *first, 4, *second, 4], **types))
    torch.testing.assert_close(together, torch.stack(own), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(alone, torch.stack(own), atol=1e-4, rtol=1e-4)
    assert torch.stack(own).std() > 0.001
