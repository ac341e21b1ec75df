"""Tests forwards and backwards of models whose ranks divide the tokens of each row, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ppo_ds.models.policy import Policy
from tests.support.ranks import RankServer

WIDTH = 40  # of the responses
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL),
    "experts": Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 4))
def test_divided_rows_have_the_outputs_and_gradients_of_whole_rows(
    tmp_path: Path, rank_server: RankServer, ranks: int
) -> None:
    rank_server.check("tests.models.sequence_worker:main", 4, str(tmp_path), str(ranks), limit=300)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 2 * len(FAMILIES)
    for name, gaps in found.items():
        assert gaps["outputs"] < 1e-5 and gaps["gradients"] < 1e-5, (name, gaps)
        # what is not divided are outputs, masks and the filling tokens
        assert gaps["kept"] < 1.25 / ranks, (name, gaps)


def test_models_whose_heads_or_rows_cannot_be_divided_are_refused() -> None:
    def why(config: object, parts: int, packed: bool = True, positions: bool = True) -> str | None:
        policy = Policy(AutoModelForCausalLM.from_config(config), 1.0)
        policy.packed, policy._positions = packed, positions and policy._positions
        return policy.why_not_divided(parts)

    assert why(FAMILIES["llama"], 4) is None
    assert why(FAMILIES["llama"], 8) == "its 8 attention heads and 4 key-value heads are not divisible by it"
    assert why(FAMILIES["llama"], 3) == "its 8 attention heads and 4 key-value heads are not divisible by it"
    assert why(FAMILIES["llama"], 4, positions=False) == "its forward must take position_ids"
    window = MistralConfig(**SMALL, sliding_window=4)
    assert why(window, 2, packed=False) == "its rows cannot be packed"
    eager = LlamaConfig(**SMALL, attn_implementation="eager")
    assert why(eager, 2) == "its attn_implementation must be sdpa"
    # OPT has no key for its key-value heads
    opt = OPTConfig(vocab_size=50, hidden_size=32, ffn_dim=16, num_hidden_layers=1, num_attention_heads=4)
    assert (
        why(opt, 4) is None
        and why(opt, 3) == "its 4 attention heads and 4 key-value heads are not divisible by it"
    )
