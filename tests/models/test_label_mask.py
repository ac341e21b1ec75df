"""Tests a policy whose head runs for some response tokens only, and noise on its embeddings."""

import copy
import math

import pytest
import torch

from ppo_ds.models.neftune import EmbeddingNoise
from ppo_ds.models.policy import Policy
from tests.models.test_lm_head import FAMILIES, R, T, V, batch, model  # noqa: F401

LABELS = torch.zeros(3, R, dtype=torch.bool)
LABELS[0, 1], LABELS[1, 2:4], LABELS[2, 4] = True, True, True


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_labels_have_the_numbers_and_gradients_of_all_logits(batch, family, packed):  # noqa: F811
    lm = model(family)
    reference, policy = copy.deepcopy(lm), Policy(lm, 1.0)
    if packed and not policy.choose_layout("packed", torch.device("cpu"), policy).packed:
        pytest.skip("its attention does not take packed rows")
    chosen, means, correct = [], [], []
    for row, real, wanted in zip(*batch, LABELS, strict=True):
        start, labels = int(real[: T - R].sum()), wanted[real[T - R :]]
        table = reference(input_ids=row[real][None]).logits[0, start - 1 : -1].log_softmax(-1)[labels]
        tokens = row[T - R :][wanted]
        chosen.append(table.gather(1, tokens[:, None])[:, 0])
        means.append(table.mean(-1))
        correct.append(table.argmax(-1) == tokens)
    chosen, means, correct = map(torch.cat, (chosen, means, correct))
    (chosen - 0.2 * means).square().sum().backward()
    rows = []  # states that the head receives
    for _ in range(2):  # the first forward detects how the model changes its logits
        lm.zero_grad()
        hook = lm.get_output_embeddings().register_forward_hook(lambda _m, given, _o: rows.append(given[0]))
        out = policy(*batch, R, label_mask=LABELS, with_mean=True, with_correct=True)
        hook.remove()
        torch.testing.assert_close(out.logprobs[LABELS], chosen, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.mean_logprobs[LABELS], means, rtol=1e-5, atol=1e-5)
        assert torch.equal(out.correct[LABELS], correct)
        assert not out.logprobs[~LABELS].any() and not out.correct[~LABELS].any()
        (out.logprobs - 0.2 * out.mean_logprobs)[LABELS].square().sum().backward()
        for (name, ours), theirs in zip(lm.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert rows[-1].shape[:-1].numel() == int(LABELS.sum())


@pytest.fixture
def policy():
    return Policy(model("llama"), 1.0)


def embedding_noise(policy, rows, noise):
    """Returns what ``noise`` adds to the embeddings of a forward."""
    seen = []
    embedding = policy.lm.get_input_embeddings()
    for each in (None, noise):
        base = policy.lm.model.layers[0].register_forward_pre_hook(
            lambda _m, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        policy(*rows, R, noise=each)
        base.remove()
    assert not embedding._forward_hooks
    return seen[1] - seen[0]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_noise_is_uniform_and_scaled_by_each_rows_own_length(policy, batch, packed):  # noqa: F811
    policy.packed = packed
    ids, mask = batch
    with torch.no_grad():
        added = embedding_noise(policy, batch, EmbeddingNoise(5.0, torch.tensor([7, 8, 9])))
    lengths = mask.sum(1).tolist()
    rows = added[0].split(lengths) if packed else [row[:n] for row, n in zip(added, lengths, strict=True)]
    for row, length in zip(rows, lengths, strict=True):
        limit = 5.0 / math.sqrt(length * 16)
        assert 0.9 * limit < float(row.abs().max()) <= limit * (1 + 1e-6)
        assert float(row.std()) == pytest.approx(limit / math.sqrt(3), rel=0.2)


def test_the_noise_of_a_row_depends_on_its_seed_only(policy, batch):  # noqa: F811
    """A row has the same log-probs packed, padded, and in another micro-batch."""
    seeds = torch.tensor([7, 8, 9])
    expected = policy(*batch, R, noise=EmbeddingNoise(5.0, seeds)).logprobs
    plain = policy(*batch, R).logprobs
    other = policy(*batch, R, noise=EmbeddingNoise(5.0, seeds + 1)).logprobs
    assert (expected - plain).abs().max() > 1e-3 and (expected - other).abs().max() > 1e-3
    alone = policy(*(x[1:] for x in batch), R, noise=EmbeddingNoise(5.0, seeds[1:])).logprobs
    policy.packed = True
    packed = policy(*batch, R, noise=EmbeddingNoise(5.0, seeds)).logprobs
    torch.testing.assert_close(alone, expected[1:], rtol=0, atol=1e-6)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
