"""Writes folders with the sizes of the Hub models of the experiments, to estimate memory without a network.

The numbers are those of the models' config.json files. The folders have no weights, and a small tokenizer in
place of the models' own. Models with the same tokenizer on the Hub have the same one here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ppo_ds.models import tiny


def _qwen(
    family: str, hidden: int, layers: int, heads: int, kv: int, inner: int, **more: Any
) -> dict[str, Any]:
    sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads)
    common = dict(vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768)
    return (
        {"model_type": family, "num_key_value_heads": kv, "intermediate_size": inner} | sizes | common | more
    )


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen("qwen2", 896, 24, 14, 2, 4864),
    "Qwen/Qwen2.5-7B-Instruct": _qwen(
        "qwen2", 3584, 28, 28, 4, 18944, vocab_size=152064, tie_word_embeddings=False
    ),
    "Qwen/Qwen2.5-72B-Instruct": _qwen(
        "qwen2", 8192, 80, 64, 8, 29568, vocab_size=152064, tie_word_embeddings=False
    ),
    "Qwen/Qwen3-0.6B": _qwen("qwen3", 1024, 28, 16, 8, 3072, head_dim=128),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": _qwen("qwen3", 1024, 28, 16, 8, 3072, head_dim=128),
    "Skywork/Skywork-Reward-V2-Qwen3-4B": _qwen("qwen3", 2560, 36, 32, 8, 9728, head_dim=128),
    "jingyaogong/MiniMind2-Small": _qwen("llama", 512, 8, 8, 2, 1408, vocab_size=6400),
    "OpenAssistant/reward-model-deberta-v3-large-v2": {
        "model_type": "deberta-v2",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 128100,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
    "internlm/internlm2-1_8b-reward": {  # has its own code
        "model_type": "internlm2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 92544,
    },
}
CHARACTERS = {"Qwen2.5": "abc25", "Qwen3": "abc3"}  # by the name of the family


def hub_folders(root: Path, layers: int | None = None) -> dict[str, str]:
    """Writes all folders and returns their paths by the models' names on the Hub.

    With ``layers``, the models have this number of layers, and otherwise their own.
    """
    for name, config in CONFIGS.items():
        config = config if layers is None else config | {"num_hidden_layers": layers}
        family = next((family for family in CHARACTERS if family in name), "")
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        tiny.character_tokenizer(CHARACTERS.get(family, "xyz")).save(folder)
    return {name: str(root / name) for name in CONFIGS}
