"""Tests log-probs and entropy of a linear head, computed without all logits in memory at once.

They are compared to float64 and autograd on all logits, and the memory is measured.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppo_ds.compute import linear_logprobs
from ppo_ds.compute.linear_logprobs import GPU_BLOCK, has_fp32_products, linear_logits, linear_statistics
from tests.ops.by_name import linear_logprobs_and_entropy
from tests.support.fp32_products import fp32_products

K, H, V = 6, 4, 11


def example(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    draws = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((K, H), (V, H), (V,))
    ]
    hidden, weight, offset = (x.requires_grad_() for x in draws)
    return hidden, weight, offset if bias else None, torch.randint(V, (K,), generator=generator)


def plain(hidden, weight, bias, labels, temperature):
    """Computes in float64."""
    logits = hidden.double() @ weight.double().t() / temperature
    table = (logits if bias is None else logits + bias.double() / temperature).log_softmax(-1)
    return table.gather(1, labels[:, None])[:, 0], -(table.exp() * table).sum(1)


def loss_of(logprobs, entropy):
    return (logprobs * torch.linspace(-1, 2, K)).sum() + entropy.square().sum()


def gradients(loss, inputs):
    return torch.autograd.grad(loss, [x for x in inputs if x is not None])


# blocks of one, two, five and all columns; recomputed for the backward pass, or kept
BLOCKS = pytest.mark.parametrize("block", [1, 2 * K, 5 * K + 3, 1000])
KEPT = pytest.mark.parametrize("kept", [0, 1000], ids=["again", "kept"])


@BLOCKS
@KEPT
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_blocks_change_nothing(block, kept, temperature, bias):
    *inputs, labels = example(bias=bias)
    expected = plain(*inputs, labels, temperature)
    found = linear_logprobs_and_entropy(
        *inputs, labels, temperature, block_elements=block, kept_elements=kept
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(loss_of(*found), inputs), gradients(loss_of(*expected), inputs))


@BLOCKS
@KEPT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype, block, kept):
    """The outputs are fp32, and the gradients have the dtype of the inputs.

    In 16 bits the logits are rounded; 8 bits of values up to 8 give an error of 0.03.
    """
    *inputs, labels = example(dtype)
    expected = plain(*inputs, labels, 0.7)
    found = linear_logprobs_and_entropy(*inputs, labels, 0.7, block_elements=block, kept_elements=kept)
    off = 1e-5 if dtype == torch.float32 else 0.05
    assert [x.dtype for x in found] == [torch.float32] * 2
    torch.testing.assert_close(found, expected, rtol=0, atol=off, check_dtype=False)
    for ours, theirs in zip(
        gradients(loss_of(*found), inputs), gradients(loss_of(*expected), inputs), strict=True
    ):
        assert ours.dtype == dtype and float((ours - theirs).abs().max()) < off * float(theirs.abs().max())


@KEPT
def test_only_requested_outputs_are_computed(kept):
    hidden, weight, bias, labels = example()
    logprobs, entropy = linear_logprobs_and_entropy(
        hidden, weight, bias, labels, with_entropy=False, kept_elements=kept
    )
    expected, _ = plain(hidden, weight, bias, labels, 1.0)
    assert entropy is None
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(
        gradients(logprobs.sum(), (hidden, weight, bias)), gradients(expected.sum(), (hidden, weight, bias))
    )
    frozen = linear_logprobs_and_entropy(hidden, weight.detach(), None, labels, kept_elements=kept)[0]
    torch.testing.assert_close(
        torch.autograd.grad(frozen.sum(), hidden),
        torch.autograd.grad(plain(hidden, weight, None, labels, 1.0)[0].sum(), hidden),
    )
    # the log-probs are not used, so they get no gradient
    entropy = linear_logprobs_and_entropy(hidden.detach(), weight, bias, labels, kept_elements=kept)[1]
    _, expected = plain(hidden, weight, bias, labels, 1.0)
    torch.testing.assert_close(
        gradients(entropy.sum(), (weight, bias)), gradients(expected.sum(), (weight, bias))
    )


@BLOCKS
@KEPT
def test_masked_rows_may_hold_arbitrary_values(block, kept):
    hidden, weight, bias, labels = example()
    wanted = torch.tensor([True, False, True, True, False, True])
    rubbish = hidden.detach().clone()
    rubbish[1], rubbish[4] = float("nan"), float("inf")
    rubbish.requires_grad_()
    found = linear_logprobs_and_entropy(
        rubbish, weight, bias, labels, block_elements=block, kept_elements=kept
    )
    expected = plain(hidden, weight, bias, labels, 1.0)
    ours, theirs = (
        torch.where(wanted, logprobs + entropy, 0.0).sum() for logprobs, entropy in (found, expected)
    )
    torch.testing.assert_close(
        gradients(ours, (rubbish, weight, bias)), gradients(theirs, (hidden, weight, bias))
    )


@BLOCKS
@KEPT
def test_tokens_excluded_by_an_infinite_bias(block, kept):
    """A bias of -inf excludes tokens, including the first tokens."""
    hidden, weight, bias, labels = example()
    out = torch.zeros(V, dtype=torch.bool)
    out[[0, 1, 2, 7]] = True
    labels = torch.tensor([3, 4, 5, 6, 8, 9])
    found = linear_logprobs_and_entropy(
        hidden,
        weight,
        bias.detach().masked_fill(out, -torch.inf),
        labels,
        block_elements=block,
        kept_elements=kept,
    )
    expected = plain(hidden, weight[~out], bias[~out], labels - torch.tensor([3, 3, 3, 3, 4, 4]), 1.0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        gradients(loss_of(*found), (hidden, weight)), gradients(loss_of(*expected), (hidden, weight))
    )


class Peak(TorchDispatchMode):
    """Measures the bytes of tensors created in the context: those alive now, and the peak."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.bytes = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known:
                self.alive[x.untyped_storage()._cdata] = (
                    StorageWeakRef(x.untyped_storage()),
                    x.untyped_storage().nbytes(),
                )
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.now = sum(size for _, size in self.alive.values())
        self.bytes = max(self.bytes, self.now)
        return out


@pytest.mark.parametrize(
    ("dtype", "gigabytes"), [(torch.float32, 1.2), (torch.bfloat16, 1.0)], ids=["fp32", "bf16"]
)
def test_memory_of_a_large_vocabulary(dtype, gigabytes):
    """Runs 8 x 1,024 tokens of a vocabulary of 151,936 in GPU-sized blocks.

    The gradient of the weight takes 0.54 or 0.27 GB, in addition to a few blocks; the logits would take 5 GB.
    """
    with FakeTensorMode():  # tracks shapes and lifetimes, without values
        hidden, weight = (torch.empty(rows, 896, dtype=dtype, requires_grad=True) for rows in (8192, 151936))
        labels = torch.empty(8192, dtype=torch.long)
        with Peak() as peak:
            logprobs, entropy = linear_logprobs_and_entropy(
                hidden, weight, None, labels, 0.7, block_elements=GPU_BLOCK
            )
            (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad.nbytes < peak.bytes < gigabytes * 1e9


@pytest.mark.parametrize("wanted", [False, True])
def test_blocks_are_kept_only_for_a_backward_pass(wanted):
    """The backward pass frees the blocks. All blocks together have 6 x 1,100 numbers, one has 6 x 11."""
    hidden, _, _, labels = example(torch.float32)
    weight = torch.zeros(100 * V, H, requires_grad=True)
    with torch.set_grad_enabled(wanted), Peak() as peak:
        logprobs, _ = linear_logprobs_and_entropy(hidden, weight, None, labels, block_elements=K * V)
        assert (peak.bytes >= 4 * K * 100 * V) == wanted
        if wanted:
            (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
            torch.zeros(1)  # triggers the next measurement
            assert peak.now < gradient.nbytes + 4 * 2 * K * V


@BLOCKS
@KEPT
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_mean_over_the_vocabulary_and_the_most_likely_token(block, kept, temperature):
    """The mean is that of torch's log_softmax, alone and beside the other outputs."""
    *inputs, labels = example(bias=True)
    hidden, weight, bias = inputs
    table = ((hidden @ weight.T + bias) / temperature).log_softmax(-1)
    labels = torch.where(torch.arange(K) % 2 == 0, table.argmax(-1), labels)
    expected = plain(*inputs, labels, temperature)
    for weight_of_others in (0.0, 1.0):
        found = linear_statistics(
            *inputs, labels, temperature, with_mean=True, block_elements=block, kept_elements=kept
        )
        torch.testing.assert_close(found.mean_logprobs, table.mean(-1))
        assert torch.equal(found.correct, table.argmax(-1) == labels) and 0 < int(found.correct.sum()) < K
        ours, theirs = found.mean_logprobs.square().sum(), table.mean(-1).square().sum()
        if weight_of_others:
            ours, theirs = ours + loss_of(*found[:2]), theirs + loss_of(*expected)
        torch.testing.assert_close(
            gradients(ours, inputs), torch.autograd.grad(theirs, inputs, retain_graph=True)
        )


@pytest.mark.parametrize("kept", [0, 1000], ids=["again", "kept"])
def test_no_labels_at_all(kept):
    hidden, weight, bias, labels = (x[:0] if i in (0, 3) else x for i, x in enumerate(example(bias=True)))
    found = linear_statistics(hidden, weight, bias, labels, with_mean=True, kept_elements=kept)
    assert [len(each) for each in found] == [0] * 4
    for gradient in gradients((found.logprobs + found.mean_logprobs).sum(), (hidden, weight, bias)):
        assert not gradient.any()


# -- products in float32 -----------------------------------------------------------------------------


def test_the_cpu_has_no_float32_products_of_16_bit_matrices():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert not has_fp32_products(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_logits_in_float32_and_their_gradients(bias, monkeypatch):
    """Values are those of float32, gradients those of float32 rounded to bfloat16 once."""
    monkeypatch.setattr(linear_logprobs, "_product", fp32_products)
    *inputs, _ = example(torch.bfloat16, bias)
    wide = [None if x is None else x.detach().float().requires_grad_() for x in inputs]
    logits = linear_logits(inputs[0].view(2, 3, H), *inputs[1:])
    expected = torch.nn.functional.linear(*wide).view(2, 3, V)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    found, wanted = (
        gradients((x * torch.linspace(-1, 2, V)).sum(), leaves)
        for x, leaves in ((logits, inputs), (expected, wide))
    )
    assert all(x.dtype == torch.bfloat16 for x in found)
    torch.testing.assert_close([x.float() for x in found], list(wanted), rtol=1e-2, atol=1e-2)
