"""Compares the decode backends ``static`` and ``vllm``: seconds of generation, seconds and bytes of a sync.

    .venv-vllm/bin/python benchmarks/backends.py

Both decode the same prompts with the same model (random weights) in one process, alternately. Ratios are
computed for each pair, so that drifts in the speed of the machine cancel. All responses are equally long.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"),
]

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.distributed.exit import exit_now
from ppo_ds.distributed.world import connect
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.rollout.keys import VLLMConfig
from ppo_ds.rollout.static import StaticGenerator
from ppo_ds.rollout.vllm import VLLMGenerator
from ppo_ds.types import Prompts

VOCABULARY = 8192


def main(argv: list[str]) -> int:
    args = parsed(argv)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29517")
    connect(timeout_minutes=30, threads=args.threads)
    torch.manual_seed(0)
    lm = model(args)
    tokens = args.rows * (args.prompt_tokens + args.new_tokens)
    common = {"lm": lambda: lm, "tokenizer": character_tokenizer("ab"), "token_budget": tokens}
    longest = args.prompt_tokens + args.new_tokens
    engine = VLLMGenerator(
        **common, settings=VLLMConfig(), kv_cache=args.kv_cache_mib * 2**20, longest=longest, temperature=1.0
    )
    static = StaticGenerator(**common)
    ids = torch.randint(3, VOCABULARY, (args.rows, args.prompt_tokens))
    limits, empty = torch.full((args.rows,), args.new_tokens), tuple({} for _ in range(args.rows))
    prompts = Prompts(ids, torch.ones_like(ids, dtype=torch.bool), limits, empty)
    ratios, syncs = [], []
    print(f"{'pair':<6}{'static, s':>12}{'vllm, s':>12}{'ratio':>8}{'sync, s':>12}", flush=True)
    for number in range(args.pairs + 1):  # the first pair is not counted
        start = time.perf_counter()
        with engine.loaded(iter(lm.named_parameters())):
            sync = time.perf_counter() - start
            ours, theirs = (seconds(each, prompts, args.new_tokens) for each in (static, engine))
        if number:
            ratios.append(ours / theirs)
            syncs.append(sync)
            print(f"{number:<6}{ours:>12.2f}{theirs:>12.2f}{ratios[-1]:>8.2f}{sync:>12.4f}", flush=True)
    size = sum(parameter.nbytes for parameter in lm.parameters()) / 2**20
    print(f"\nseconds of generation, static over vllm: {spread(ratios)}")
    print(f"seconds of a sync of {size:.1f} MiB: {spread(syncs)}")
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="benchmarks/backends.py", allow_abbrev=False)
    for name, default, text in (
        ("--pairs", 7, "measured pairs"),
        ("--rows", 32, "prompts of a pair"),
        ("--prompt-tokens", 32, "tokens of each prompt"),
        ("--new-tokens", 64, "tokens of each response"),
        ("--width", 320, "width of the model, a multiple of 64"),
        ("--layers", 4, "layers of the model"),
        ("--threads", 1, "threads"),
        ("--kv-cache-mib", 256, "size of vLLM's cache"),
    ):
        p.add_argument(name, type=int, default=default, help=f"{text}; default {default}")
    return p.parse_args(argv)


def model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Makes a Llama in fp32 with random weights, heads of size 64 and an untied head."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def seconds(generator: Generator, prompts: Prompts, new_tokens: int) -> float:
    sampling = SamplingParams(new_tokens, 0, 1.0, 1.0, 0, stop_token_ids=(), stop_strings=())
    start = time.perf_counter()
    generator(prompts, sampling)
    return time.perf_counter() - start


def spread(values: list[float]) -> str:
    return f"median {median(values):.4g}, from {min(values):.4g} to {max(values):.4g}"


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
