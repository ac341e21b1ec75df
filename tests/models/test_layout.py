"""Tests the padded and the packed layout of a forward pass.

The independent reference is the forward of transformers on one row at a time, without padding and masks.
"""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    masking_utils,
)

from ppo_ds.models import packed_attention
from ppo_ds.models.layout import make_layout
from ppo_ds.models.lora import add_adapters
from ppo_ds.models.packed_attention import (
    attention_per_sequence,
    layout_forward,
    packed_arguments,
    why_not_packed,
    why_padded,
)
from ppo_ds.models.policy import Policy
from ppo_ds.models.value import ScoreModel

V = 40
SMALL = dict(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=32,
    initializer_range=0.3,
)
GROUPED = SMALL | dict(num_key_value_heads=2)
EXPERTS = GROUPED | dict(num_experts_per_tok=2)
FULL = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=None),
    "gpt2": lambda: GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=4, initializer_range=0.3),
    "gpt_neox": lambda: GPTNeoXConfig(**SMALL),
    "opt": lambda: OPTConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=32,
        word_embed_proj_dim=16, init_std=0.3,
        max_position_embeddings=64, dropout=0.0,
    ),
    "phi": lambda: PhiConfig(**GROUPED),
    "mixtral": lambda: MixtralConfig(**EXPERTS, num_local_experts=4, sliding_window=None),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **EXPERTS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    "olmoe": lambda: OlmoeConfig(**EXPERTS, num_experts=4),
}  # fmt: skip
OTHERS = {
    "mistral_window": lambda: MistralConfig(**GROUPED, sliding_window=3),
    "gemma2": lambda: Gemma2Config(**GROUPED, head_dim=8, sliding_window=3),
    "mamba": lambda: MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, initializer_range=0.3),
}
ALL = FULL | OTHERS
WAYS = [(family, False) for family in ALL] + [(family, True) for family in FULL]
EACH_WAY = pytest.mark.parametrize(
    ("family", "packed"),
    WAYS,
    ids=[f"{family}-{'packed' if packed else 'padded'}" for family, packed in WAYS],
)
CPU = torch.device("cpu")
LENGTHS = [(2, 6), (9, 1), (1, 3), (4, 4)]  # lengths of prompt and response
P, R = 9, 6


@pytest.fixture
def batch():
    """Makes left-padded prompts and right-padded responses, with arbitrary ids in the padding."""
    torch.manual_seed(1)
    ids = torch.randint(4, V, (len(LENGTHS), P + R))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, (p, r) in enumerate(LENGTHS):
        mask[i, P - p : P + r] = True
    return ids, mask


def model(family, auto=AutoModelForCausalLM, **changes):
    torch.manual_seed(0)
    config = ALL[family]()
    config.pad_token_id = 0
    for name, value in changes.items():
        setattr(config, name, value)
    return auto.from_config(config).eval()


def policy(family, packed, value_head=False, dtype=torch.float32):
    made = Policy(model(family).to(dtype), 0.7, value_head)
    made.packed = packed
    if value_head:
        torch.nn.init.normal_(made.value_head.weight)
    return made.eval()


# -- positions -------------------------------------------------------------------------------------


def test_a_layout_worked_by_hand():
    ids = torch.tensor([[91, 92, 11, 12, 21, 93, 94], [31, 32, 33, 34, 41, 42, 95]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    padded, packed = (
        make_layout(ids, mask, 3, torch.nn.Linear(1, 1), packed=packed) for packed in (False, True)
    )
    assert (
        padded.ids[0, :3].tolist() == [11, 12, 21]
        and padded.ids[1].tolist() == [31, 32, 33, 34, 41, 42]
        and padded.ids.shape == (2, 6)
    )
    assert (
        padded.mask.tolist() == [[True] * 3 + [False] * 3, [True] * 6]
        and padded.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    )
    assert (
        padded.label_positions.tolist() == [1, 9, 10]
        and padded.state_positions.tolist() == [1, 2, 9, 10, 11]
        and padded.last_positions.tolist() == [2, 11]
    )
    assert packed.ids.tolist() == [[11, 12, 21, 31, 32, 33, 34, 41, 42]] and packed.mask.all()
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5]]
    assert (
        packed.label_positions.tolist() == [1, 6, 7]
        and packed.state_positions.tolist() == [1, 2, 6, 7, 8]
        and packed.last_positions.tolist() == [2, 8]
    )
    assert (
        packed.packing["cu_seq_lens_q"].tolist() == [0, 3, 9]
        and packed.packing["max_length_k"] == 6
        and padded.packing == {}
    )
    for layout in (padded, packed):
        assert layout.labels.tolist() == [21, 41, 42]
        assert layout.scatter(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0, 0], [2, 3, 0]]
        assert layout.scatter_states(torch.arange(1.0, 6.0)).tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]


def test_what_is_no_row_of_prompt_and_response():
    nothing = torch.nn.Linear(1, 1)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(AssertionError, match="padding between"):
        make_layout(ids, torch.tensor([[1, 0, 1, 1]]), 1, nothing, packed=False)
    with pytest.raises(AssertionError, match="without a token before its response"):
        make_layout(ids, torch.tensor([[0, 0, 1, 1]]), 2, nothing, packed=True)


# -- log-probs, entropy and gradients --------------------------------------------------------------


def alone(lm, ids, mask, temperature=0.7):
    """Returns the log-probs and entropies at the response tokens of each row."""
    for i, (p, r) in enumerate(LENGTHS):
        row = ids[i][mask[i]]
        table = torch.log_softmax(
            lm(input_ids=row[None], use_cache=False).logits[0, p - 1 : p - 1 + r] / temperature, dim=-1
        )
        yield table.gather(1, row[p:, None])[:, 0], -(table.exp() * table).sum(1)


@EACH_WAY
def test_logprobs_entropy_and_gradients_are_those_of_each_row_alone(batch, family, packed):
    made, reference = policy(family, packed), model(family)
    weights = torch.randn(len(LENGTHS), R, 2, generator=torch.Generator().manual_seed(2))
    out = made(*batch, R, with_entropy=True)
    expected = 0.0
    for i, (logprobs, entropy) in enumerate(alone(reference, *batch)):
        r = len(logprobs)
        torch.testing.assert_close(out.logprobs[i, :r], logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(out.entropy[i, :r], entropy, rtol=0, atol=1e-5)
        assert not out.logprobs[i, r:].any() and not out.entropy[i, r:].any()
        expected = expected + (weights[i, :r, 0] * logprobs + weights[i, :r, 1] * entropy).sum()
    ((weights[..., 0] * out.logprobs).sum() + (weights[..., 1] * out.entropy).sum()).backward()
    expected.backward()
    for (name, parameter), own in zip(made.lm.named_parameters(), reference.parameters(), strict=True):
        # an expert without tokens has a gradient of None or zero
        found, wanted = (torch.zeros_like(p) if p.grad is None else p.grad for p in (parameter, own))
        torch.testing.assert_close(
            found, wanted, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert sum(float(p.grad.abs().sum()) for p in reference.parameters() if p.grad is not None) > 1


SCORERS = [
    (family, packed) for family, packed in WAYS if family not in ("mamba", "olmoe")
]  # transformers has no sequence classifier of mamba and olmoe


@pytest.mark.parametrize(("family", "packed"), SCORERS)
def test_values_and_scores_are_those_of_each_row_alone(batch, family, packed):
    ids, mask = batch
    trunk = model(family, AutoModelForSequenceClassification, num_labels=1)
    reference = model(family, AutoModelForSequenceClassification, num_labels=1)
    torch.nn.init.normal_(trunk.score.weight, generator=torch.Generator().manual_seed(3))
    reference.score.weight.data.copy_(trunk.score.weight)
    scorer = ScoreModel(trunk)
    scorer.packed = packed
    values, scores = scorer(ids, mask, R), scorer(ids, mask)
    for i, (p, r) in enumerate(LENGTHS):
        states = reference.score(
            reference.base_model(input_ids=ids[i][mask[i]][None], use_cache=False).last_hidden_state
        )[0, :, 0]
        torch.testing.assert_close(values[i, : r + 1], states[p - 1 :], rtol=0, atol=1e-5)
        torch.testing.assert_close(scores[i], states[-1], rtol=0, atol=1e-5)
        assert not values[i, r + 1 :].any()
    right = torch.nn.utils.rnn.pad_sequence(
        [row[m] for row, m in zip(ids, mask, strict=True)], batch_first=True, padding_value=7
    )
    there = torch.arange(right.shape[1]) < mask.sum(1)[:, None]
    # the side of the padding makes no difference
    torch.testing.assert_close(scorer(right, there), scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_value_head_of_the_policy(batch, packed):
    made = policy("llama", packed, value_head=True)
    values = made(*batch, R).values
    for i, (p, r) in enumerate(LENGTHS):
        hidden = made.lm.base_model(input_ids=batch[0][i][batch[1][i]][None]).last_hidden_state[0, p - 1 :]
        torch.testing.assert_close(
            values[i, : r + 1], (hidden @ made.value_head.weight[0]), rtol=0, atol=1e-5
        )
        assert not values[i, r + 1 :].any()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_experts_balance_is_that_of_the_real_tokens(batch, family, packed):
    """More padding around the same rows, with other ids, does not change the loss."""
    made = policy(family, packed)
    ids, mask = batch
    wide = torch.nn.functional.pad(mask, (3, 5))
    wider = torch.where(wide, torch.nn.functional.pad(ids, (3, 5)), 9)
    aux = made(ids, mask, R, with_aux=True).aux
    torch.testing.assert_close(made(wider, wide, R + 5, with_aux=True).aux, aux)
    made.packed = not packed
    torch.testing.assert_close(made(ids, mask, R, with_aux=True).aux, aux, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_and_padded_agree_in_16_bits(batch, family):
    one, other = (
        policy(family, packed, dtype=torch.bfloat16)(*batch, R, with_entropy=True) for packed in (False, True)
    )
    exact = policy(family, True)(*batch, R).logprobs
    assert (one.logprobs - other.logprobs).abs().max() < 0.05 and (
        one.entropy - other.entropy
    ).abs().max() < 0.05
    assert 1e-4 < (other.logprobs - exact).abs().max() < 0.2  # the computation was in 16 bits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_packed_forward_is_repeated_packed(batch, family, adapters):
    """Gradient checkpointing recomputes each layer in the backward pass, after the forward has returned."""
    gradients = {}
    for checkpointing in (False, True):
        made = policy(family, packed=True).train()
        if adapters:
            add_adapters(made.lm, rank=2, alpha=4.0, targets=None, seed=0, key="actor.lora")
        if checkpointing:
            made.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            made.lm.enable_input_require_grads()
        (made(*batch, R).logprobs.sum() * 3).backward()
        gradients[checkpointing] = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    assert gradients[True].keys() == gradients[False].keys() and len(gradients[True]) > 4
    for name, gradient in gradients[False].items():
        torch.testing.assert_close(gradients[True][name], gradient, rtol=1e-5, atol=1e-6)


def test_a_packed_model_still_generates_from_padded_prompts(batch):
    made = policy("llama", packed=True)
    made(*batch, R)
    ids, mask = batch[0][:, :P], batch[1][:, :P]
    drawn = made.lm.generate(
        ids, attention_mask=mask.long(), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    for i, (p, _) in enumerate(LENGTHS):
        single = made.lm.generate(
            ids[i : i + 1, P - p :],
            attention_mask=torch.ones(1, p),
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
        )
        assert drawn[i, P:].tolist() == single[0, p:].tolist()


# -- attention -------------------------------------------------------------------------------------


def test_attention_of_each_sequence_by_hand():
    """Two sequences and 4 heads in 2 groups match a causal softmax in float64."""
    q, k, v = (
        torch.randn(5, heads, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(heads))
        for heads in (4, 2, 2)
    )
    out = attention_per_sequence(q, k, v, [0, 2, 5], 0.5)
    for place, head in ((i, h) for i in range(5) for h in range(4)):
        seen = slice(0 if place < 2 else 2, place + 1)
        weights = torch.softmax(0.5 * k[seen, head // 2] @ q[place, head], dim=0)
        torch.testing.assert_close(out[place, head], weights @ v[seen, head // 2])


def test_the_attention_of_packed_rows_is_registered():
    assert AttentionInterface()["sdpa"] is packed_attention.attention


def test_layers_without_the_ends_of_the_sequences_are_an_error(batch):
    """A model that does not pass the sequence boundaries on would let rows attend to each other."""
    made = policy("llama", packed=True)
    made.lm.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (
            args,
            {name: value for name, value in kwargs.items() if name not in packed_arguments([1], CPU)},
        ),
        with_kwargs=True,
    )
    with pytest.raises(
        AssertionError, match="LlamaAttention does not receive the ends of the sequences in a packed row"
    ):
        made(*batch, R)


@pytest.mark.parametrize("packed", [False, True])
def test_no_mask_is_made(batch, packed):
    """With packed rows a mask would have N * N entries; with padded rows it would exclude the fast kernel."""
    made, masks = policy("llama", packed), []
    made.lm.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    made(*batch, R)
    assert masks == [None]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt", "mistral_window", "gemma2"])
def test_the_host_reads_nothing_back_in_a_padded_forward(batch, family):
    """The meta device holds no values, so any ``.item()`` raises an error."""
    ids, mask = batch
    lm = Policy(model(family).to("meta"), 0.7).lm.base_model
    layout = make_layout(ids, mask, R, lm, packed=False)
    with layout_forward(lm, packed=False):
        assert lm(**layout.arguments()).last_hidden_state.shape == (*layout.ids.shape, 16)


def test_the_host_reads_nothing_back_in_a_packed_forward(batch):
    """Tests the case with an attention kernel, which is replaced by a stub; values are not compared."""
    lm = model("llama").to("meta")
    layout = make_layout(*batch, R, lm, packed=True)
    with pytest.MonkeyPatch.context() as patched, layout_forward(lm, packed=True):
        patched.setattr("ppo_ds.models.packed_attention.has_kernel", lambda query, value: True)
        patched.setattr("ppo_ds.models.packed_attention.varlen_attn", lambda query, *args, **settings: query)
        assert lm(**layout.arguments()).logits.shape == (1, int(batch[1].sum()), V)


def test_other_forwards_still_find_out_what_is_packed():
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    assert masking_utils.find_packed_sequence_indices(positions).tolist() == [[0, 0, 1, 1, 1]]


@pytest.mark.parametrize("family", ALL)
def test_which_models_can_be_packed(family):
    assert (why_not_packed(model(family)) is None) == (family in FULL)
    assert (why_padded(model(family), "packed", CPU) is None) == (family in FULL)
    # the CPU has no kernel for packed rows
    assert why_padded(model(family), "padded", CPU) and why_padded(model(family), "auto", CPU)


def test_what_keeps_a_model_from_being_packed():
    assert (
        why_not_packed(model("mistral_window"))
        == "MistralForCausalLM has layers other than full attention (sliding_attention)"
    )
    eager = AutoModelForCausalLM.from_config(ALL["llama"](), attn_implementation="eager")
    assert why_not_packed(eager) == "the attention of LlamaForCausalLM (eager) cannot be replaced"
