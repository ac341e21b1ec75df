"""Tests the policy on tiny random causal LMs of each family.

Log-probs, entropy and values of each row are compared in test_layout.py.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, MistralConfig, Qwen3Config

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.policy import Policy, load_policy, unsharded_twin
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.hf import generate
from tests.support.models import SIZES, decoders

V = 60
SMALL = dict(vocab_size=V, **SIZES, initializer_range=0.5)
GROUPED = SMALL | dict(num_key_value_heads=1)
FAMILIES = decoders(V, std=0.5, dropout=0.1) | {
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=8, attention_dropout=0.1, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**GROUPED, attention_dropout=0.1),
    "gemma": lambda: GemmaConfig(**GROUPED, head_dim=8, attention_dropout=0.1),
}
EVERY = pytest.mark.parametrize("family", FAMILIES)
LENGTHS = [(1, 2), (4, 3), (2, 5)]  # lengths of prompt and response
P, R = 4, 5


def saved(folder, family, generation_config=None):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return str(folder)


def load(folder, temperature=1.0, dtype="fp32", gradient_checkpointing=False):
    model = ModelConfig(path=str(folder), dtype=dtype, gradient_checkpointing=gradient_checkpointing)
    return load_policy(model, temperature=temperature, key="actor.model.path")


def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def batch():
    """Makes left-padded prompts and right-padded responses, with arbitrary ids in the padding."""
    torch.manual_seed(1)
    ids = torch.randint(4, V, (3, P + R))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, (p, r) in enumerate(LENGTHS):
        mask[i, P - p : P + r] = True
    return ids, mask


@EVERY
def test_dropout_of_the_folder_has_no_effect_in_train_mode(tmp_path, batch, family):
    folder = saved(tmp_path, family)
    assert "0.1" in (tmp_path / "config.json").read_text()
    policy = load(folder).train()
    torch.manual_seed(3)
    first, second = policy(*batch, R)[0], policy(*batch, R)[0]
    assert torch.equal(first, second) and torch.equal(first, policy.eval()(*batch, R)[0])


# -- gradient checkpointing ------------------------------------------------------------------------


@EVERY
def test_gradient_checkpointing_recomputes_every_layer_and_changes_no_gradient(tmp_path, batch, family):
    folder = saved(tmp_path, family)
    gradients, calls = {}, {}
    for checkpointing in (False, True):
        policy = load(folder, gradient_checkpointing=checkpointing).train()
        layers = [
            module
            for module in policy.modules()
            if type(module).__name__.endswith(("DecoderLayer", "NeoXLayer", "GPT2Block"))
        ]
        assert len(layers) == 2
        count = [0]
        for layer in layers:
            attention = next(
                m
                for name, m in layer.named_children()
                if "attn" in name or "attention" in name and "norm" not in name
            )
            attention.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        logprobs, entropy, *_ = policy(*batch, R, with_entropy=True)
        forward = count[0]
        mask = batch[1][:, P:]
        (logprobs[mask].sum() + entropy[mask].sum()).backward()
        calls[checkpointing] = (forward, count[0] - forward)
        gradients[checkpointing] = {name: p.grad.clone() for name, p in policy.named_parameters()}
    assert calls == {False: (2, 0), True: (2, 2)}
    for name, gradient in gradients[False].items():
        torch.testing.assert_close(gradients[True][name], gradient, rtol=1e-5, atol=1e-6)


# -- the folder's generation config ----------------------------------------------------------------


SHIPPED = dict(
    do_sample=True, top_k=20, repetition_penalty=1.3, temperature=0.1, eos_token_id=[5, 7], pad_token_id=6
)


def test_the_folders_generation_config_is_not_used_but_saved(tmp_path):
    folder = saved(tmp_path / "there", "qwen2", SHIPPED)
    policy = load(folder)
    policy.save(tmp_path / "here")
    written = json.loads((tmp_path / "here" / "generation_config.json").read_text())
    assert {key: written[key] for key in SHIPPED} == SHIPPED

    prompts = torch.randint(8, V, (64, 3), generator=torch.Generator().manual_seed(4))
    drawn = dict(
        limits=torch.full((64,), 12),
        sampling=SamplingParams(12, 0, 1.0, 1.0, 0, stop_token_ids=(), stop_strings=()),
        tokenizer=SimpleNamespace(pad_id=6),
    )
    bare = load(saved(tmp_path / "bare", "qwen2"))
    for lm in (policy.lm.eval(), bare.lm.eval()):
        torch.manual_seed(5)
        responses, logprobs = generate(lm, prompts, torch.ones_like(prompts, dtype=torch.bool), **drawn)
        if lm is policy.lm:
            first, first_logprobs = responses, logprobs
    ended = torch.isin(first, torch.tensor(SHIPPED["eos_token_id"])).cumsum(1) > 1
    # rows do not end at the end tokens of the folder's generation config
    assert ended.any() and (first[ended] != 6).any()
    assert torch.equal(first, responses) and torch.equal(first_logprobs, logprobs)


def test_a_generation_config_that_contradicts_itself_can_be_saved(tmp_path):
    """Many models have a temperature without do_sample, which transformers reports as inconsistent."""
    policy = load(saved(tmp_path / "there", "llama", dict(temperature=0.6, top_p=0.9, eos_token_id=5)))
    policy.save(tmp_path / "here")
    written = json.loads((tmp_path / "here" / "generation_config.json").read_text())
    assert (written["temperature"], written["top_p"], written["eos_token_id"]) == (0.6, 0.9, 5)


# -- saving ----------------------------------------------------------------------------------------


@EVERY
def test_what_is_saved_loads_with_equal_logits(tmp_path, batch, family):
    policy = load(saved(tmp_path / "there", family))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)))
    policy.save(tmp_path / "by_itself")
    weights = {name: weight.clone() for name, weight in policy.lm.state_dict().items()}
    with torch.no_grad():
        expected = policy.eval().lm(input_ids=batch[0]).logits
        for parameter in policy.parameters():
            parameter.zero_()  # saving must write the given state dict, not the parameters
    policy.save(tmp_path / "given", weights)
    for folder in ("by_itself", "given"):
        with torch.no_grad():
            assert torch.equal(reference(tmp_path / folder)(input_ids=batch[0]).logits, expected)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt", "gemma"])
def test_tied_weights_stay_tied(tmp_path, family):
    policy = load(saved(tmp_path / "there", family))
    policy.save(tmp_path / "here", {name: weight.clone() for name, weight in policy.lm.state_dict().items()})
    for lm in (policy.lm, load(tmp_path / "here").lm):
        assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def test_vocab_size_is_that_of_the_embedding(tmp_path):
    assert load(saved(tmp_path, "llama")).vocab_size == V


def test_errors_name_the_key(tmp_path):
    with pytest.raises(UserError, match="^actor.model.path=.*: no such folder"):
        load(tmp_path / "nowhere")


# -- the weight copy of a sharded model ------------------------------------------------------------


@EVERY
def test_a_filled_twin_is_the_same_model(tmp_path, batch, family):
    lm = load(saved(tmp_path, family)).lm.train()
    twin = unsharded_twin(lm, torch.device("cpu"))
    assert not twin.training and not any(p.requires_grad for p in twin.parameters())
    assert {p.numel() for p in twin.parameters()} == {0}
    tied = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    assert (twin.get_output_embeddings().weight is twin.get_input_embeddings().weight) == tied
    for source, hollow in zip(lm.parameters(), twin.parameters(), strict=True):
        hollow.data = source.data.clone()
    with torch.no_grad():
        lm.eval()
        assert torch.equal(twin(input_ids=batch[0]).logits, lm(input_ids=batch[0]).logits)
        for parameter in lm.parameters():
            parameter.zero_()
        assert twin(input_ids=batch[0]).logits.abs().max() > 0  # the copy shares no memory with the source


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_a_twins_buffers_are_copies_in_their_own_dtype(tmp_path, family):
    """The buffers are copied because no state dict contains them.

    For example, the inverse frequencies of RoPE are float32 even in a bf16 model.
    """
    lm = load(saved(tmp_path, family), dtype="bf16").lm
    twin = unsharded_twin(lm, torch.device("cpu"))
    here, there = dict(lm.named_buffers()), dict(twin.named_buffers())
    assert here.keys() == there.keys() and any("inv_freq" in name for name in here)
    for name, buffer in here.items():
        assert (
            there[name].dtype == buffer.dtype
            and torch.equal(there[name], buffer)
            and there[name].data_ptr() != buffer.data_ptr()
        )
        assert "inv_freq" not in name or buffer.dtype == torch.float32
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}


def test_a_twin_does_not_take_its_sampling_from_the_folder(tmp_path):
    policy = load(saved(tmp_path, "llama", SHIPPED))
    twin = unsharded_twin(policy.lm, torch.device("cpu"))
    assert (
        isinstance(policy, Policy)
        and twin.generation_config.repetition_penalty in (None, 1.0)
        and twin.generation_config.eos_token_id is None
    )
