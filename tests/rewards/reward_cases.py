"""Provides a byte-level tokenizer (one id per byte), hand-made rollouts, and a stand-in for the scorer."""

from contextlib import contextmanager
from threading import Lock

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ppo_ds.types import Rollout

SPECIAL = ["<bos>", "<eos>", "<pad>", "[CLS]", "[SEP]"]
BOS, EOS, PAD, CLS, SEP = range(5)
VOCAB = len(SPECIAL) + 256
LOADING = Lock()
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% "
    "endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(folder, *, pad="<pad>", template=None, cross_encoder=False):
    """Saves a tokenizer that encodes a text as <bos> text.

    With ``cross_encoder`` it encodes a pair as [CLS] a [SEP] b [SEP] with token types, like BERT's tokenizer.
    """
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if cross_encoder:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
        )
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
        hf = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=pad,
            cls_token="[CLS]",
            sep_token="[SEP]",
            model_input_names=inputs,
        )
    else:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
        inputs = ["input_ids", "attention_mask"]
        hf = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<bos>",
            eos_token="<eos>",
            pad_token=pad,
            model_input_names=inputs,
        )
    hf.chat_template = template
    hf.save_pretrained(folder)
    return str(folder)


def make_rollout(tokenizer, pairs, rows=None, finished=None):
    """Builds a rollout of (prompt, response) texts; finished ones end with <eos>, which is an action."""
    finished = [True] * len(pairs) if finished is None else finished
    prompts = [torch.tensor(tokenizer.encode_many([prompt], special_tokens=True)[0]) for prompt, _ in pairs]
    responses = [
        torch.tensor(
            tokenizer.encode_many([response], special_tokens=False)[0] + [EOS] * done, dtype=torch.long
        )
        for (_, response), done in zip(pairs, finished, strict=True)
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    prompt_ids = pad(prompts, batch_first=True, padding_value=tokenizer.pad_id, padding_side="left")
    prompt_mask = pad([torch.ones_like(p).bool() for p in prompts], batch_first=True, padding_side="left")
    response_ids = pad(responses, batch_first=True, padding_value=tokenizer.pad_id)
    response_mask = pad([torch.ones_like(r).bool() for r in responses], batch_first=True)
    return Rollout(
        ids=torch.cat([prompt_ids, response_ids], 1),
        attention_mask=torch.cat([prompt_mask, response_mask], 1),
        response_mask=response_mask,
        finished=torch.tensor(finished),
        limits=torch.full((len(pairs),), response_mask.shape[1]),
        logprobs=torch.zeros(response_mask.shape),
        metadata=tuple(
            row | {"prompt_text": prompt}
            for row, (prompt, _) in zip(rows or [{}] * len(pairs), pairs, strict=True)
        ),
    )


def loaded(load, model, key):
    """Calls a loader of a frozen model, in one thread at a time.

    transformers replaces functions of its classes while it loads a model. Two threads that load at once could
    leave PreTrainedModel.tie_weights without effect in all later tests of the process.
    """
    with LOADING:
        return load(model, key=key)


class Placed:
    """A scorer on the CPU that counts its forwards and fails outside resident()."""

    device = torch.device("cpu")

    def __init__(self, module):
        self.module = module
        self.batches = []
        self.here = False

    @contextmanager
    def resident(self):
        self.here = True
        try:
            yield
        finally:
            self.here = False

    def __call__(self, ids, attention_mask, *, token_type_ids):
        assert self.here, "scored outside resident()"
        assert not torch.is_grad_enabled()
        self.batches.append(tuple(ids.shape))
        return self.module(ids, attention_mask, token_type_ids=token_type_ids)
