"""Compares loss and gradients of supervised fine-tuning with those that transformers computes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MixtralConfig
from transformers.trainer_pt_utils import LabelSmoother

from ppo_ds.config.sections.finetune import SFTConfig
from ppo_ds.finetune.sft import SFTTrainer
from ppo_ds.models.policy import Policy
from ppo_ds.types import Sequences
from tests.models.test_lm_head import CHANGED, GROUPED, LINEAR, V

LENGTHS, WIDTH = [12, 5, 9, 3], 12
FAMILIES = {name: LINEAR[name] for name in ("llama", "qwen2", "gpt2", "gpt_neox")} | {
    "gemma2": CHANGED["gemma2"],
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=6),
    "mixtral": lambda: MixtralConfig(
        **GROUPED, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.3
    ),
}


@pytest.fixture
def batch():
    """Makes rows of different lengths, of which one has two learned spans."""
    torch.manual_seed(0)
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    learned = torch.zeros(4, WIDTH, dtype=torch.bool)
    for row, spans in enumerate([[(2, 5), (8, 12)], [(1, 5)], [(8, 9)], [(2, 3)]]):
        for start, end in spans:
            learned[row, start:end] = True
    return Sequences(torch.randint(1, V, (4, WIDTH)), mask, learned[:, 1:])


def lm_of(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()


def trainer(policy, ranks=1, **options):
    """Makes the stage around a policy without an engine."""

    class Actor:
        module = policy

        def __call__(self, *args, **kwargs):
            return policy(*args, **kwargs)

    empty = dict.fromkeys(
        ("total_steps train_tokens score_tokens eval_rows eval_weights update rows held_out prompts "
         "generator tokenizer").split()
    )  # fmt: skip
    world = SimpleNamespace(size=ranks, rank=0, device=torch.device("cpu"))
    config = SFTConfig(**options)
    return SFTTrainer(context=SimpleNamespace(world=world), config=config, seed=0, actor=Actor(), **empty)


def labels_of(batch):
    labels = torch.full_like(batch.ids, -100)
    labels[:, 1:][batch.response_mask] = batch.ids[:, 1:][batch.response_mask]
    return labels


def inputs_of(batch):
    return {"input_ids": batch.ids, "attention_mask": batch.attention_mask.long()}


def assert_same_gradients(lm, reference):
    for (name, ours), theirs in zip(lm.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_loss_of_a_batch(batch, family, layout):
    lm = lm_of(family)
    reference, stage = copy.deepcopy(lm), trainer(Policy(lm, 1.0))
    policy = stage.actor.module
    packs = layout == "packed" and policy.choose_layout("packed", torch.device("cpu"), policy).packed
    if layout == "packed" and not packs:
        pytest.skip("its attention does not take packed rows")
    if packs and stage.aux_coef:
        pytest.skip("the balance of experts counts other rows' tokens in a packed row")
    out = reference(**inputs_of(batch), labels=labels_of(batch))
    out.loss.backward()
    loss, parts = stage.loss(torch.arange(4), batch=batch, totals=stage.totals(batch), index=0)
    loss.backward()
    torch.testing.assert_close(loss, out.loss, rtol=0, atol=1e-5)
    assert_same_gradients(lm, reference)
    guesses = out.logits[:, :-1].argmax(-1)[batch.response_mask]
    right = float((guesses == labels_of(batch)[:, 1:][batch.response_mask]).sum())
    assert parts["sft/token_accuracy"].tolist() == [right, int(batch.response_mask.sum())]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mistral"])
def test_micro_batches_add_up_as_with_num_items_in_batch(batch, family):
    """On two ranks each part is doubled, because DeepSpeed averages gradients over ranks."""
    lm = lm_of(family)
    reference = copy.deepcopy(lm)
    stage, tokens = trainer(Policy(lm, 1.0), ranks=2), int(batch.response_mask.sum())
    parts = [torch.tensor([0, 3]), torch.tensor([2]), torch.tensor([1])]
    for rows in parts:
        micro = batch.select(rows)
        expected = reference(**inputs_of(micro), labels=labels_of(micro), num_items_in_batch=tokens).loss
        expected.backward()
        loss, _ = stage.loss(rows, batch=batch, totals=stage.totals(batch), index=0)
        (loss / 2).backward()
        torch.testing.assert_close(loss / 2, expected, rtol=0, atol=1e-5)
    assert_same_gradients(lm, reference)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mistral", "gemma2"])
def test_label_smoothing_is_that_of_transformers(batch, family):
    lm = lm_of(family)
    reference, stage = copy.deepcopy(lm), trainer(Policy(lm, 1.0), label_smoothing=0.2)
    out = reference(**inputs_of(batch))
    expected = LabelSmoother(epsilon=0.2)(out, labels_of(batch), shift_labels=True)
    expected.backward()
    loss, parts = stage.loss(torch.arange(4), batch=batch, totals=stage.totals(batch), index=0)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    assert_same_gradients(lm, reference)
    assert float(parts["sft/nll"][0] / parts["sft/nll"][1]) == pytest.approx(
        float(
            torch.nn.functional.cross_entropy(
                out.logits[:, :-1].flatten(0, 1), labels_of(batch)[:, 1:].flatten()
            )
        ),
        abs=1e-5,
    )


def test_a_micro_batch_without_learned_tokens_has_no_loss_and_no_gradient(batch):
    """Ranks repeat a row without a loss where the rows cannot be divided among them."""
    lm = lm_of("llama")
    stage, totals = trainer(Policy(lm, 1.0), label_smoothing=0.1), trainer(None).totals(batch)
    empty = Sequences(batch.ids, batch.attention_mask, torch.zeros_like(batch.response_mask))
    loss, _ = stage.loss(torch.tensor([1]), batch=empty, totals=totals, index=0)
    loss.backward()
    assert float(loss) == 0 and not any(p.grad.any() for p in lm.parameters() if p.grad is not None)


def test_noise_depends_on_step_and_row_and_not_on_the_micro_batch(batch):
    stage = trainer(Policy(lm_of("llama"), 1.0), neftune_alpha=5.0, batch_size=4)
    totals = stage.totals(batch)

    def loss(rows, index):
        return float(stage.loss(torch.tensor(rows), batch=batch, totals=totals, index=index)[0].detach())

    whole = loss([0, 1, 2, 3], 1)
    assert whole == pytest.approx(loss([3, 1], 1) + loss([2, 0], 1), abs=1e-5)
    plain = trainer(stage.actor.module)
    assert len({whole, loss([0, 1, 2, 3], 2)}) == 2
    assert abs(whole - float(plain.loss(torch.arange(4), batch=batch, totals=totals, index=1)[0])) > 1e-4
    seeds = [stage.noise(torch.arange(4), index).seeds.tolist() for index in (0, 1)]
    assert len(set(seeds[0] + seeds[1])) == 8
