"""Compares the LM head that returns log-probs to transformers' logits with log_softmax and autograd."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
)

from ppo_ds.compute import linear_logprobs
from ppo_ds.models import lm_head
from ppo_ds.models.lm_head import HeadProbe, LMHead
from ppo_ds.models.lora import add_adapters
from ppo_ds.models.policy import Policy, unsharded_twin
from tests.support.fp32_products import fp32_products
from tests.support.models import SIZES

V, T, R = 50, 9, 5
SMALL = dict(vocab_size=V, **SIZES, initializer_range=0.3, pad_token_id=0)
GROUPED = SMALL | dict(num_key_value_heads=1)
LINEAR = {
    "llama": lambda: LlamaConfig(**GROUPED, tie_word_embeddings=False),
    "llama tied": lambda: LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3),
    # the head of GPT-J has a bias
    "gptj": lambda: GPTJConfig(
        vocab_size=V, n_embd=16, n_layer=2, n_head=2, rotary_dim=4, initializer_range=0.3,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**SMALL),
    "opt": lambda: OPTConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        word_embed_proj_dim=8, init_std=0.3,
        max_position_embeddings=64, do_layer_norm_before=False, tie_word_embeddings=True,
    ),
}  # fmt: skip
CHANGED = {
    "gemma2": lambda: Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=3.0),
    "cohere": lambda: CohereConfig(**GROUPED, logit_scale=0.25),
    "granite": lambda: GraniteConfig(**GROUPED, logits_scaling=4.0),
}
FAMILIES = LINEAR | CHANGED


def model(family, dtype=torch.float32):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(FAMILIES[family]()).to(dtype).eval()
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        nn.init.normal_(lm.get_output_embeddings().bias)
    return lm


@pytest.fixture
def batch():
    """Makes three rows: padded on both sides, padded on one side, and unpadded."""
    torch.manual_seed(1)
    ids, mask = torch.randint(1, V, (3, T)), torch.ones(3, T, dtype=torch.bool)
    mask[0, :2], mask[0, 7:], mask[1, :3] = False, False, False
    return ids, mask


def plainly(lm, ids, mask, temperature):
    """Returns the log-probs and entropies [r] of each unpadded row as a list, computed from all logits."""
    for row, real in zip(ids, mask, strict=True):
        start, response = int(real[: T - R].sum()), row[T - R :][real[T - R :]]
        logits = lm(input_ids=row[real][None]).logits[0, start - 1 : -1].float() / temperature
        table = logits.log_softmax(-1)
        yield table.gather(1, response[:, None])[:, 0], -(table.exp() * table).sum(-1)


def loss_of(logprobs, entropy):
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum() + 0.3 * entropy.square().sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_and_gradients_are_those_of_the_logits(batch, family, temperature):
    lm = model(family)
    reference = copy.deepcopy(lm)
    pairs = list(plainly(reference, *batch, temperature))
    expected = [torch.cat(column) for column in zip(*pairs, strict=True)]
    loss_of(*expected).backward()
    policy, responses = Policy(lm, temperature), batch[1][:, T - R :]
    for _ in range(2):  # the first forward detects how the model changes its logits
        lm.zero_grad()
        out = policy(*batch, R, with_entropy=True)
        found = out.logprobs[responses], out.entropy[responses]
        torch.testing.assert_close(found, tuple(expected), rtol=1e-5, atol=1e-5)
        loss_of(*found).backward()
        for (name, ours), theirs in zip(lm.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert isinstance(lm.get_output_embeddings(), LMHead)
    # OPT's own forward calls the decoder inside its base model
    assert policy.head_probe == HeadProbe(makes_logits=family in LINEAR, reads_trunk=family != "opt")
    assert policy(*batch, R).entropy is None


class Largest(TorchDispatchMode):
    """Records the largest element count of any tensor [..., width] created inside the block, except views."""

    def __init__(self, width):
        super().__init__()
        self.width, self.numbers = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        made = [
            x
            for x in tree_leaves(out)
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known
        ]
        self.numbers = max([self.numbers, *(x.numel() for x in made if x.shape[-1:] == (self.width,))])
        return out


@pytest.mark.parametrize(("family", "numbers"), [("llama", 0), ("granite", 13 * V)])
def test_logits_are_made_of_no_state_or_of_the_asked_ones_alone(batch, family, numbers, monkeypatch):
    """13 of 27 positions are needed; blocks of logits are two columns wide."""
    monkeypatch.setattr("ppo_ds.compute.linear_logprobs.CPU_BLOCK", 26)
    policy = Policy(model(family), 1.0)
    policy(*batch, R, with_entropy=True)
    with Largest(V) as found:
        policy(*batch, R, with_entropy=True).logprobs.sum().backward()
    assert found.numbers == numbers


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_an_entropy_that_is_only_looked_at_has_no_gradient(batch, family):
    policy = Policy(model(family), 1.0)
    trained, seen = (
        policy(*batch, R, with_entropy=True, entropy_gradient=wanted) for wanted in (True, False)
    )
    assert torch.equal(trained.entropy, seen.entropy) and torch.equal(trained.logprobs, seen.logprobs)
    assert trained.entropy.requires_grad and not seen.entropy.requires_grad and seen.logprobs.requires_grad


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_without_a_question_the_model_is_what_it_was(tmp_path, batch, family):
    lm = model(family)
    reference = copy.deepcopy(lm)
    policy = Policy(lm, 0.7)
    policy(*batch, R)
    with torch.no_grad():
        expected = reference(input_ids=batch[0]).logits
        assert torch.equal(lm(input_ids=batch[0]).logits, expected)
        twin = unsharded_twin(lm, torch.device("cpu"))
        for source, hollow in zip(lm.parameters(), twin.parameters(), strict=True):
            hollow.data = source.data.clone()
        assert type(twin.get_output_embeddings()) is LMHead and torch.equal(
            twin(input_ids=batch[0]).logits, expected
        )
        policy.save(tmp_path)
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=batch[0]).logits, expected
        )


def test_a_forward_that_fails_takes_its_question_back(batch):
    policy = Policy(model("llama"), 1.0)
    expected = policy(*batch, R).logprobs
    failing = policy.lm.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy(*batch, R)
    failing.remove()
    assert policy.lm(input_ids=batch[0]).logits.shape == (3, T, V) and torch.equal(
        policy(*batch, R).logprobs, expected
    )


class Narrow(nn.Module):
    """An output head that is not a linear layer."""

    def __init__(self, linear):
        super().__init__()
        self.inner, self.in_features = linear, linear.in_features

    def forward(self, hidden):
        return self.inner(hidden).tanh()


def test_a_head_of_another_kind_makes_logits(batch):
    lm = model("llama")
    lm.lm_head = Narrow(lm.lm_head)
    found = Policy(lm, 0.7)(*batch, R, with_entropy=True)
    pairs = list(plainly(lm, *batch, 0.7))
    for column, expected in zip((found.logprobs, found.entropy), zip(*pairs, strict=True), strict=True):
        torch.testing.assert_close(column[batch[1][:, T - R :]], torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_a_value_head_reads_what_the_head_reads(batch):
    """The head's input may be narrower than the model, as after the projection of OPT."""
    lm = model("opt")
    policy = Policy(lm, 1.0, value_head=True)
    nn.init.normal_(policy.value_head.weight)
    given = []
    hook = lm.lm_head.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    values = policy(*batch, R).values
    lm(input_ids=batch[0][2:])
    hook.remove()
    assert policy.value_head.in_features == 8
    torch.testing.assert_close(
        values[2], given[-1][0, T - R - 1 :] @ policy.value_head.weight[0], rtol=1e-5, atol=1e-5
    )


def test_frozen_heads_of_adapted_models_pass_gradients_on(batch):
    """LoRA freezes the head: its weight gets no gradient, but the adapters before it do."""
    lm = model("llama")
    policy = Policy(lm, 1.0)
    add_adapters(lm, rank=2, alpha=4, targets=None, seed=1, key="actor.lora")
    policy(*batch, R).logprobs.sum().backward()
    found = {
        name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None
    }
    assert (
        found
        and all("lora" in name for name in found)
        and any(float(gradient.abs().max()) > 0 for gradient in found.values())
    )


def test_logits_of_bf16_are_rounded_as_the_model_rounds_them(batch):
    lm = model("llama", torch.bfloat16)
    out = Policy(lm, 1.0)(*batch, R, with_entropy=True)
    assert out.logprobs.dtype == out.entropy.dtype == torch.float32
    with torch.no_grad():
        table = lm(input_ids=batch[0][2:]).logits[0].float().log_softmax(-1)[T - R - 1 : -1]
    torch.testing.assert_close(
        out.logprobs[2], table.gather(1, batch[0][2, T - R :, None])[:, 0], rtol=0, atol=0.05
    )


@pytest.mark.parametrize("family", ["llama", "gptj", "gemma2"])
def test_decoding_on_a_gpu_computes_the_logprobs_of_training(batch, family, monkeypatch):
    """With fp32 products in both, log-probs of a bf16 model agree to 1e-5; rounded logits differ by more.

    The inference copy, which decodes under ZeRO-3, computes them too. Gemma 2 caps its logits after the head.
    """
    lm = model(family, torch.bfloat16)
    with torch.no_grad():
        lm.get_output_embeddings().weight.mul_(8)  # logits as large as those of a trained model
    policy, (ids, _), row = Policy(lm, 1.0), batch, slice(2, 3)
    twin = unsharded_twin(lm, torch.device("cpu"))
    for source, target in zip(lm.parameters(), twin.parameters(), strict=True):
        target.data = source.data.clone()

    def decoded(model):
        table = model(input_ids=ids[row]).logits[0, T - R - 1 : -1].float().log_softmax(-1)
        return table.gather(1, ids[2, T - R :, None])[:, 0]

    with torch.no_grad():
        rounded = decoded(lm)
        monkeypatch.setattr(linear_logprobs, "_product", fp32_products)
        monkeypatch.setattr(lm_head, "has_fp32_products", lambda a, b: a.dtype == b.dtype == torch.bfloat16)
        trained = policy(ids, batch[1], R).logprobs[2]
        assert lm(input_ids=ids[row]).logits.dtype == torch.float32
        for found in (decoded(lm), decoded(twin)):
            torch.testing.assert_close(found, trained, rtol=0, atol=1e-5)
        assert (rounded - trained).abs().max() > 1e-3
