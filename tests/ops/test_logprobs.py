"""Tests log-probs and entropy: goldens, gradients, chunks, and the memory of forward and backward."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppo_ds.ops.logprobs import logprobs_and_entropy_from_logits
from ppo_ds.ops.sequences import response_slice
from tests.ops.by_name import entropy_from_logits, logprobs_from_logits
from tests.ops.golden import assert_no_stale_entries, check, gradient, leaf, outputs


def logits(c):
    return c.logits[:, :-1]


def labels(c):
    return c.sequences[:, 1:]


def logprobs(temperature):
    return lambda c: logprobs_from_logits(logits(c), labels(c), temperature)


def entropy(c):
    return entropy_from_logits(logits(c))


def response_only(c):
    width = c.params["prompt_width"]
    states = response_slice(c.logits, width, c.sequences.shape[1] - width)
    return logprobs_from_logits(states, c.sequences[:, width:])


def grad_of(function):
    def grad(c):
        x = leaf(logits(c))
        return gradient((c.w * function(x, c)).sum(), x)

    return grad


TARGETS = {
    "dschat.gather_log_probs": logprobs(1.0),
    "trl.selective_log_softmax": logprobs(1.0),
    "verl.logprobs_from_logits_*": logprobs(1.0),
    "openrlhf.log_probs_from_logits": logprobs(1.0),
    "torchtune.logits_to_logprobs": logprobs(1.0),
    "fp32_then_log_softmax": logprobs(1.0),
    "torchtune.response_logprobs": response_only,
    "*.T0.7": logprobs(0.7),
    "*.T1.3": logprobs(1.3),
    "verl.entropy_from_logits": entropy,
    "openrlhf.compute_entropy": entropy,
    "grad_logits_of_sum_w_logprob": grad_of(lambda x, c: logprobs_from_logits(x, labels(c))),
    "grad_logits_of_sum_w_entropy": grad_of(lambda x, c: entropy_from_logits(x)),
}
IN_BF16 = "computed in bf16: about 1e-2 off; fp32_then_log_softmax is what is right"
NOT_TARGETS = {f"bf16/{peer}.*": IN_BF16 for peer in ("dschat", "trl", "verl", "openrlhf", "torchtune")}


@pytest.mark.parametrize(("case", "key"), outputs("logprobs.json", NOT_TARGETS))
def test_golden(case, key):
    check(case, key, TARGETS)


def test_every_table_entry_is_used():
    assert_no_stale_entries("logprobs.json", TARGETS, NOT_TARGETS)


def example(shape=(3, 5), vocabulary=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(vocabulary, shape, generator=generator)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 4, 7, 1024])
@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 5), (5, 1)])
def test_chunks_and_shapes_change_nothing(shape, chunk_size):
    x, y = example(shape)
    x = leaf(x)
    expected = torch.log_softmax(x / 0.7, dim=-1)
    logprob, entropy = logprobs_and_entropy_from_logits(x, y, 0.7, chunk_size)
    torch.testing.assert_close(logprob, expected.gather(-1, y[..., None])[..., 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    loss = (logprob + 0.3 * entropy.square()).sum()
    reference = (
        expected.gather(-1, y[..., None])[..., 0] + 0.3 * (expected.exp() * expected).sum(-1).square()
    ).sum()
    torch.testing.assert_close(gradient(loss, x), gradient(reference, x))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_untouched_logits(dtype, temperature):
    x, y = example(dtype=dtype)
    x, before = leaf(x), x.clone()
    logprob, entropy = logprobs_and_entropy_from_logits(x, y, temperature)
    (logprob + entropy).sum().backward()
    assert logprob.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert x.grad.dtype == dtype
    assert torch.equal(x.detach(), before)


def test_large_logits_stay_exact():
    x = torch.tensor([[20000.0, 19999.0, -20000.0]])
    logprob, entropy = logprobs_and_entropy_from_logits(x, torch.tensor([1]))
    assert logprob.item() == pytest.approx(-1.3132617, abs=1e-6)  # -1 - log(1 + 1/e)
    assert entropy.item() == pytest.approx(0.5822031, abs=1e-6)


def test_masked_rows_may_hold_arbitrary_values():
    x, y = example((4,))
    x[1], x[2] = float("nan"), float("inf")
    x = leaf(x)
    logprob, entropy = logprobs_and_entropy_from_logits(x, y)
    wanted = torch.tensor([True, False, False, True])
    torch.where(wanted, logprob + entropy, 0.0).sum().backward()
    assert x.grad[wanted].isfinite().all() and x.grad[wanted].ne(0).any()
    assert torch.equal(x.grad[~wanted], torch.zeros_like(x.grad[~wanted]))


def test_minus_infinity_at_masked_vocabulary_entries_has_finite_gradients():
    x, y = example((4,))
    x[:, 3], y = float("-inf"), torch.tensor([0, 1, 2, 4])
    x = leaf(x)
    logprob, entropy = logprobs_and_entropy_from_logits(x, y)
    (logprob + entropy).sum().backward()
    assert x.grad.isfinite().all() and torch.equal(x.grad[:, 3], torch.zeros(4, dtype=torch.float64))


class Largest(TorchDispatchMode):
    """Records the element count of every tensor created in the context, except views, by dtype."""

    def __init__(self):
        super().__init__()
        self.elements: dict[torch.dtype, list[int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.elements.setdefault(x.dtype, []).append(x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "slice"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk", [5, 48])
def test_memory_is_a_chunk_and_the_gradient(dtype, sliced, chunk):
    """Forward and backward over [8,16] rows need one float32 chunk, and one gradient in the logits' dtype."""
    vocabulary = 64
    x, y = example((8, 16), vocabulary, dtype)
    x = leaf(torch.nn.functional.pad(x, (0, 0, 2, 1)) if sliced else x)
    # a slice of positions is not contiguous, and must not be copied
    states = x[:, 2:-1] if sliced else x
    with Largest() as seen:
        logprob, entropy = logprobs_and_entropy_from_logits(states, y, 0.7, chunk)
        # a gradient of the slice, not of x: the slice's backward would allocate too
        (grad,) = torch.autograd.grad((logprob + entropy).sum(), states)
    assert grad.numel() == 128 * vocabulary
    full = {d: sum(n > chunk * vocabulary for n in sizes) for d, sizes in seen.elements.items()}
    assert full == {d: int(d == dtype) for d in full}
