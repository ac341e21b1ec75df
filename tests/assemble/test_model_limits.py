"""Tests the limits of a model's positions, which are checked before any computation."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from ppo_ds.assemble.roles import ppo_needs
from ppo_ds.errors import UserError
from ppo_ds.models.policy import Policy

SMALL = dict(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    initializer_range=0.3,
    pad_token_id=0,
)
LONG = dict(
    rope_type="longrope",
    short_factor=[1.0] * 4,
    long_factor=[4.0] * 4,
    rope_theta=1e4,
    original_max_position_embeddings=16,
)
ROPES = {
    "longrope": Phi3Config(
        **SMALL, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONG
    ),
    "dynamic": LlamaConfig(
        **SMALL,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    ),
    "linear": LlamaConfig(
        **SMALL,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
}


def policy(rope):
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(ROPES[rope]).eval(), 1.0)


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_rope_that_depends_on_the_longest_row_is_limited(rope):
    made = policy(rope)
    ppo_needs(20, 16).check(made, "models/it", "actor.model.path")
    with pytest.raises(
        UserError,
        match=(
            rf"^actor\.model\.path=models/it: RoPE of type {rope} .* than 16 tokens; .* may "
            r"have 17: lower .* within 16$"
        ),
    ):
        ppo_needs(20, 17).check(made, "models/it", "actor.model.path")
    ids = torch.arange(32).view(2, 16) % 20
    # The bound is exact: a row of 6 tokens has the same log-probs beside a row of 16 tokens, but not beside a
    # longer one.
    for longest, same in ((16, True), (30, False)):
        mask = torch.ones(2, longest, dtype=torch.bool)
        mask[0, 6:] = False
        wide = torch.nn.functional.pad(ids, (0, longest - 16), value=3)
        with torch.no_grad():
            gap = (
                made(wide, mask, longest - 2).logprobs[0, :4]
                - made(wide[:1, :6], mask[:1, :6], 4).logprobs[0]
            )
        assert (gap.abs().max() < 1e-6) == same


def test_rope_that_does_not_depend_on_it_is_not_limited():
    made = policy("linear")
    ppo_needs(20, 64).check(made, "models/it", "actor.model.path")
    with pytest.raises(UserError, match="has 64 positions"):
        ppo_needs(20, 65).check(made, "models/it", "actor.model.path")
