"""Tests further policy outputs: the values of a shared trunk, and the balance loss of a mixture of experts.

Also tests a temperature that is set for a single forward.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from ppo_ds.models.policy import Policy

SMALL = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
EXPERTS = {
    "mixtral": lambda: MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.02
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SMALL,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        router_aux_loss_coef=0.02,
    ),
}
R = 4


def policy(config, **options):
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(config).float(), 0.7, **options)


@pytest.fixture
def batch():
    """Makes three rows, one padded on the left and one on the right."""
    torch.manual_seed(1)
    ids, mask = torch.randint(0, 40, (3, 9)), torch.ones(3, 9, dtype=torch.bool)
    mask[0, :3], mask[1, 7:] = False, False
    return ids, mask


@pytest.mark.parametrize("family", EXPERTS)
def test_the_balance_loss_of_a_mixture_of_experts(batch, family):
    """The balance loss is the Switch Transformer's, over the attended tokens of all layers.

    It is the number of experts times the sum over experts of the product of the share of tokens routed to the
    expert and its mean probability.
    """
    moe = policy(EXPERTS[family]())
    ids, mask = batch
    out = moe(ids, mask, R, with_aux=True)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = moe.lm(
        input_ids=ids, attention_mask=mask.long(), position_ids=positions, output_router_logits=True
    ).router_logits
    sent, probability, tokens = torch.zeros(4), torch.zeros(4), 0
    for layer in logits:
        for token, attended in zip(layer.view(-1, 4), mask.flatten(), strict=True):
            if attended:
                chances = token.softmax(0)
                sent[chances.topk(2).indices] += 1
                probability += chances
                tokens += 1
    torch.testing.assert_close(
        out.aux, 4 * (sent / tokens * probability / tokens).sum(), rtol=1e-4, atol=1e-5
    )
    assert moe.balance_coef == 0.02
    out.aux.backward()
    # gradients reach the routers and the layers before them
    assert sum(float(p.grad.abs().sum()) > 0 for p in moe.lm.parameters() if p.grad is not None) > 5


def test_a_dense_model_has_no_balance_loss(batch):
    dense = policy(LlamaConfig(**SMALL))
    assert dense.balance_coef is None and dense(*batch, R).aux is None


def test_a_value_head_starts_at_zero_and_leaves_the_logprobs_unchanged(batch):
    out = policy(LlamaConfig(**SMALL), value_head=True)(*batch, R)
    assert out.values.tolist() == [[0.0] * (R + 1)] * 3
    assert torch.equal(out.logprobs, policy(LlamaConfig(**SMALL))(*batch, R).logprobs)


def test_another_temperature_for_one_forward(batch):
    model = policy(LlamaConfig(**SMALL))
    cold, plain = model(*batch, R).logprobs, model(*batch, R, temperature=1.0).logprobs
    ids, mask = batch
    logits = model.lm(
        input_ids=ids, attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp(min=0)
    ).logits[:, 4:-1]
    for found, temperature in ((cold, 0.7), (plain, 1.0)):
        expected = (logits / temperature).log_softmax(-1).gather(-1, ids[:, 5:, None])[..., 0]
        torch.testing.assert_close(found[mask[:, 5:]], expected[mask[:, 5:]])
