"""Workloads: prompts and models with random weights, in a folder that any trainer can read.

The models are Hugging Face folders: `model/` (a causal LM) and `reward/` (a sequence classifier of the same
shape, also the initial critic). `prompts.jsonl` holds the prompts of one PPO step, so that every step of
every trainer uses the same prompts.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"  # ids 0, 1, 2
DONE = "prepared.json"  # written last: only a complete folder has it
PASSES, MINIBATCHES = 2, 2  # passes over a rollout, and optimizer steps per pass, unless given


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, named as in its config."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0


@dataclass(frozen=True)
class Workload:
    """Sizes of one PPO step."""

    shape: Shape
    prompts: int  # number of prompts per PPO step, each with one response
    prompt_tokens: tuple[int, int]  # shortest and longest prompt; lengths are evenly spaced
    new_tokens: int  # length of the longest response
    mean_tokens: int | None  # mean response length before truncation at new_tokens; None: all have new_tokens
    dtype: str


CPU_MODEL = Shape(320, 4, 5, 5, 896, 8192)
# W0 is for scaling.py, which needs many samples in a short time; W3 to W5 have the sizes of Qwen2.5 0.5B,
# 1.5B and 7B; W6 has those of SmolLM2-135M
WORKLOADS = {
    "W0": Workload(Shape(192, 2, 3, 3, 512, 4096), 32, (32, 32), 32, None, "fp32"),
    "W1": Workload(CPU_MODEL, 32, (32, 32), 64, None, "fp32"),
    "W2": Workload(CPU_MODEL, 32, (8, 128), 256, 48, "fp32"),
    "W3": Workload(Shape(896, 24, 14, 2, 4864, 151936, True), 64, (256, 256), 512, None, "bf16"),
    "W4": Workload(Shape(1536, 28, 12, 2, 8960, 151936, True), 64, (256, 256), 512, None, "bf16"),
    "W5": Workload(Shape(3584, 28, 28, 4, 18944, 152064, False), 64, (256, 256), 512, None, "bf16"),
    "W6": Workload(Shape(576, 30, 9, 3, 1536, 49152, True, 100_000.0), 16, (32, 32), 32, None, "bf16"),
}


def dry(workload: Workload) -> Workload:
    """Returns a copy of the workload with tiny sizes, to test that it runs; vLLM supports the heads."""
    shape = replace(
        workload.shape,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=256,
    )
    low, high = workload.prompt_tokens
    return replace(
        workload,
        shape=shape,
        prompts=8,
        prompt_tokens=(math.ceil(low / 16), math.ceil(high / 16)),
        new_tokens=workload.new_tokens // 16,
        mean_tokens=workload.mean_tokens and 6,
    )


def prepare(workload: Workload, folder: Path, given: str | None = None, seed: int = 0) -> None:
    """Writes ``model/``, ``reward/`` and ``prompts.jsonl``, unless they exist for the same arguments.

    Args:
        given: A model folder or Hub id whose weights and tokenizer replace ``workload.shape``. The reward
        model then has the same trunk and a random head.
    """
    if is_prepared(workload, folder, given, seed):
        return
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / DONE).unlink(missing_ok=True)
    torch.manual_seed(seed)
    tokenizer = _given(given, folder) if given else _made(workload, folder)
    texts = _prompts(tokenizer, workload, random.Random(seed))
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8"
    )
    (folder / DONE).write_text(_made_for(workload, given, seed))


def is_prepared(workload: Workload, folder: Path, given: str | None = None, seed: int = 0) -> bool:
    done = folder / DONE
    return done.exists() and done.read_text() == _made_for(workload, given, seed)


def _made_for(workload: Workload, given: str | None, seed: int) -> str:
    return json.dumps({"workload": asdict(workload), "given": given, "seed": seed}, indent=2) + "\n"


def _given(path: str, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    for name, auto_class, extra in (
        ("model", AutoModelForCausalLM, {}),
        ("reward", AutoModelForSequenceClassification, {"num_labels": 1}),
    ):
        model = auto_class.from_pretrained(path, dtype="auto", **extra)
        if model.config.pad_token_id is None:
            # a classifier needs the pad id to find the last token
            model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
        _save(model, tokenizer, folder / name)
    return tokenizer


def _made(workload: Workload, folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    tokenizer = word_tokenizer(workload.shape.vocab_size)
    positions = max(512, workload.prompt_tokens[1] + workload.new_tokens)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(**asdict(workload.shape), **ids, max_position_embeddings=positions, num_labels=1)
    dtype = torch.bfloat16 if workload.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if workload.mean_tokens is not None:
        set_stop_probability(model, 1 / workload.mean_tokens, stop_id=1, never_ids=(0, 2))
    _save(model, tokenizer, folder / "model")
    del model
    _save(AutoModelForSequenceClassification.from_config(config, dtype=dtype), tokenizer, folder / "reward")
    return tokenizer


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def word_tokenizer(vocab_size: int) -> Any:
    """Makes a tokenizer of words w3, w4, ...; decoded text is tokenized to the same tokens again."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, END, UNKNOWN, *(f"w{i}" for i in range(3, vocab_size))]
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="left"
    )


def _prompts(tokenizer: Any, workload: Workload, draw: random.Random) -> list[str]:
    """Makes texts of random tokens.

    A text can have more tokens than were drawn; trainers truncate it to the length of the longest prompt.
    """
    low, high = workload.prompt_tokens
    n = workload.prompts
    lengths = [low + round(i * (high - low) / max(1, n - 1)) for i in range(n)]
    draw.shuffle(lengths)
    return [
        tokenizer.decode(
            [draw.randrange(3, len(tokenizer) - 3) for _ in range(length)], skip_special_tokens=True
        )
        for length in lengths
    ]


def set_stop_probability(model: Any, probability: float, stop_id: int, never_ids: tuple[int, ...]) -> None:
    """Changes a random Llama in place: the next token is always ``stop_id`` with ``probability``.

    One channel of the residual stream is made constant: every embedding has the same large number in it, and
    no layer reads or writes it. The other channels are small in comparison, so this number determines the
    root mean square in every norm, and the weights of the norms scale the other channels back. The head reads
    the constant channel as a bias: the stop token gets the logit that gives it ``probability``, the tokens
    ``never_ids`` get a very low logit, and all other tokens get no bias.
    """
    import torch

    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    # a norm scales this channel to about sqrt(width), and the others to a hundredth of their size
    constant = 100.0 * math.sqrt(width)
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding[:, 0], embedding[:, 1:] = constant, torch.randn_like(embedding[:, 1:])
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.fill_(100.0)
                norm.weight[0] = 0
        model.model.norm.weight.fill_(100.0)
        model.model.norm.weight[0] = 1 / math.sqrt(width)  # makes the channel 1 after the last norm
        spread = 0.1 / 0.02 / math.sqrt(width)  # gives the other logits a std of 0.1 nats
        head.mul_(spread)
        head[:, 0] = 0
        for i in never_ids:
            head[i, 0] = -30
        others = vocabulary - 1 - len(never_ids)
        head[stop_id] = 0
        head[stop_id, 0] = math.log(probability / (1 - probability)) + math.log(others) + 0.1**2 / 2
