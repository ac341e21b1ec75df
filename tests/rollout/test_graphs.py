"""Tests the graphs of decode steps against a model of CUDA graphs and of torch's allocator."""

import functools
import inspect
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ppo_ds.errors import RunError
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.rollout import continuous_batch, graphs, static
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.graphs import CudaRecorder, Graphs
from ppo_ds.rollout.static import StaticGenerator
from ppo_ds.types import Prompts
from tests.rollout.cuda_model import NOT_PERMITTED, Device, Fault, InternalAssert

OLD, NEW, NEXT = (2, 11), (2, 13), (2, 14)
V, NEW_TOKENS = 24, 16
SIZES = dict(
    vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=16, initializer_range=0.5, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
ROWS = Prompts(
    torch.tensor([[3, 4, 5], [0, 6, 7], [8, 9, 10]]),
    torch.tensor([[True, True, True], [False, True, True], [True, True, True]]),
    torch.tensor([NEW_TOKENS, 5, 9]),
    ({}, {}, {}),
)
SAMPLING = SamplingParams(NEW_TOKENS, 0, 0.8, 0.95, 10, stop_token_ids=(2,), stop_strings=())


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)


@pytest.fixture
def patch(monkeypatch):
    """Returns a function that installs a device with a version of torch; a graph has few columns."""

    def install(version, faults=None):
        device = Device(version, faults)
        device.install(monkeypatch)
        graphs.capture_stream.cache_clear()
        monkeypatch.setattr(graphs, "FAILURES_ARE_HARMLESS", version >= (2, 13))
        monkeypatch.setattr(static, "recorder_for", CudaRecorder)
        for name in ("FIRST_GRAPH_COLUMNS", "GRAPH_COLUMNS"):
            monkeypatch.setattr(continuous_batch, name, 4)
        return device

    yield install
    graphs.capture_stream.cache_clear()


def generator_of(lm):
    return StaticGenerator(
        lambda: lm, tokenizer=character_tokenizer("abcdefghijk"), token_budget=10_000, check_every=4
    )


def decode(generator, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        return generator(ROWS, SAMPLING)


@functools.cache
def plain(lm, seed=0):
    """Decodes without graphs, which the CPU does outside of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "recorder_for", lambda device: None)
        return decode(generator_of(lm), seed)


def check_same(one, other):
    assert torch.equal(one.ids, other.ids) and torch.equal(one.response_mask, other.response_mask)
    torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


def check_idle(device, leaked=0):
    """Checks that no graph is left, that no pool is in use, and that the cache can be emptied."""
    assert not device.graphs and device.use_counts == [1] * leaked
    torch.cuda.empty_cache()
    assert len(device.allocator.pools) == leaked


# -- the rules of the model --------------------------------------------------------------------------


def capture(step, pool):
    """Captures like torch.cuda.graph, which also ends a capture that has failed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream("cuda")):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    return graph


def test_a_replay_computes_what_the_step_does_on_the_same_memory(patch):
    patch(NEW)
    x, count = torch.ones(3), torch.zeros((), dtype=torch.long)

    def step():
        x.copy_(x * 2 + count)
        count.add_(1)

    graph = capture(step, torch.cuda.graph_pool_handle())
    assert x.tolist() == [1, 1, 1] and count == 0  # a capture does not run the step
    graph.replay()
    graph.replay()
    assert x.tolist() == [5, 5, 5] and count == 2


def test_a_read_on_the_host_is_not_permitted(patch):
    patch(NEW)
    with pytest.raises(RuntimeError, match="previous error") as caught:
        capture(lambda: torch.ones(()).item(), torch.cuda.graph_pool_handle())
    assert str(caught.value.__context__) == NOT_PERMITTED


@pytest.mark.parametrize(
    ("version", "use_counts"), [((2, 11), [1]), ((2, 12), [1]), ((2, 13), [1]), ((2, 14), [])]
)
def test_after_an_invalid_capture(patch, version, use_counts):
    """2.11 and 2.12 cannot empty the cache, 2.13 does not release the pool, later versions do both."""
    device = patch(version, {0: (Fault.HOST_READ, 1)})
    with pytest.raises(RuntimeError):
        capture(lambda: torch.ones(2) + torch.ones(2), torch.cuda.graph_pool_handle())
    assert device.use_counts == use_counts
    if version < (2, 13):
        with pytest.raises(InternalAssert, match="captures_underway.empty"):
            torch.cuda.empty_cache()
    else:
        torch.cuda.empty_cache()


def test_a_pool_whose_graphs_are_gone_takes_no_other(patch):
    patch(NEW)
    pool, x = torch.cuda.graph_pool_handle(), torch.zeros(2)
    first = capture(lambda: x.add_(1), pool)
    second = capture(lambda: x.add_(1), pool)
    del first
    third = capture(lambda: x.add_(1), pool)
    del second, third
    with pytest.raises(InternalAssert, match="use_count > 0"):
        capture(lambda: x.add_(1), pool)
    torch.cuda.empty_cache()
    capture(lambda: x.add_(1), pool)


def test_a_live_result_keeps_its_pool(patch):
    device = patch(NEW)
    kept = []
    capture(lambda: kept.append(torch.ones(2) + 1), torch.cuda.graph_pool_handle())
    torch.cuda.empty_cache()
    assert len(device.allocator.pools) == 1
    kept.clear()
    torch.cuda.empty_cache()
    assert not device.allocator.pools


def test_a_workspace_allocated_during_a_capture_keeps_its_pool(patch):
    device = patch(NEW)
    matrix = torch.ones(2, 2)
    capture(lambda: matrix @ matrix, torch.cuda.graph_pool_handle())
    torch.cuda.empty_cache()
    assert len(device.allocator.pools) == 1


def test_the_calls_of_the_model_are_those_of_torch():
    assert {"pool", "capture_error_mode"} < inspect.signature(
        torch.cuda.CUDAGraph.capture_begin
    ).parameters.keys()
    for call in ("capture_end", "replay"):
        assert list(inspect.signature(getattr(torch.cuda.CUDAGraph, call)).parameters) == ["self"]
    assert "device" in inspect.signature(torch.cuda.Stream.__new__).parameters
    for call in ("empty_cache", "graph_pool_handle"):
        inspect.signature(getattr(torch.cuda, call)).bind()


# -- rollouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [OLD, NEW, NEXT])
def test_rollouts_in_sequence(patch, lm, version):
    """Each rollout has a new pool, which is free afterwards; the responses are those without graphs."""
    device, generator = patch(version), generator_of(lm)
    for rollout in range(3):
        check_same(decode(generator, seed=rollout), plain(lm, seed=rollout))
        assert not device.graphs and not device.allocator.pools  # its memory is free for the update
        assert device.handles == device.allocator.emptied == rollout + 1
    assert device.captures >= 3 * 4 and device.replays > 2 * device.captures


def test_a_recorder_does_not_use_the_pool_of_an_earlier_one(patch):
    """A pool whose graphs are gone but whose memory is in use would fail with an internal assertion."""
    device, x, results = patch(NEW), torch.zeros(2), []
    for rollout in range(2):
        replay = CudaRecorder("cuda").record(lambda: results.append(x.add_(1) * 2))
        replay()
        del replay
        torch.cuda.empty_cache()
        assert not device.use_counts and len(device.allocator.pools) == rollout + 1
    assert x.tolist() == [2, 2]


@pytest.mark.parametrize("kind", ["result", "workspace"])
def test_a_rollout_after_one_whose_pool_is_still_in_use(patch, lm, caplog, kind):
    """Memory of the recordings outlives a rollout, so that its pool stays and takes no other graph.

    It is a result of the step that is still referred to, or the workspace of a library that the warm-up did
    not use.
    """
    device, generator, results = patch(NEW), generator_of(lm), []

    def keep_result(module, args, output):
        if device.allocator.captures_underway:
            results.append(output.logits)

    def forget_workspaces(module, args):
        if device.allocator.captures_underway:
            device.workspaces.clear()

    if kind == "result":
        hook = lm.register_forward_hook(keep_result)
    else:
        hook = lm.register_forward_pre_hook(forget_workspaces)
    try:
        for rollout in range(2):
            check_same(decode(generator, seed=rollout), plain(lm, seed=rollout))
            assert generator.graphs_work, caplog.text
            assert not device.use_counts and len(device.allocator.pools) == rollout + 1
    finally:
        hook.remove()
    results.clear()
    torch.cuda.empty_cache()
    assert len(device.allocator.pools) == (0 if kind == "result" else 2)


def test_weights_that_have_moved_are_not_read_at_their_old_place(patch):
    """Under ZeRO-3, each rollout gathers the weights to new memory; here the old memory is overwritten."""
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)
    device, generator = patch(NEW), generator_of(lm)
    for seed in range(2):
        check_same(decode(generator, seed), plain.__wrapped__(lm, seed))
        for parameter in lm.parameters():
            old = parameter.data
            parameter.data = old * 1.1
            old.fill_(torch.nan)
    check_same(decode(generator, 5), plain.__wrapped__(lm, 5))
    check_idle(device)


@pytest.mark.parametrize("version", [OLD, NEW, NEXT])
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("fault", Fault)
def test_a_capture_that_fails(patch, lm, caplog, version, number, fault):
    """The capture fails at the first or third shape of the first of two rollouts."""
    faults = {number: (fault, 9)}
    if fault in (Fault.NO_MEMORY, Fault.NO_MEMORY_INVALID):
        faults[number + 1] = faults[number]  # also when it is tried again
    device, generator = patch(version, faults), generator_of(lm)
    leaked = version == NEW and (1 + (fault is Fault.NO_MEMORY_INVALID)) * fault.invalidates
    if version == OLD and (fault.invalidates or fault is Fault.INSTANTIATE):
        with pytest.raises(RunError) as caught:
            decode(generator)
        message = str(caught.value)
        assert re.fullmatch(
            r"rollout.backend=static: .*torch 2.13 or later, or .*rollout.backend=hf", message
        )
        no_memory = fault is Fault.NO_MEMORY_INVALID  # in the step, not in the instantiation of its graph
        assert ("memory ran out while" in message and "memory.rollout_tokens" in message) is no_memory
        assert ("cannot be recorded" in message) is not no_memory
        return
    if fault is Fault.OTHER_CLASS:
        with pytest.raises(KeyError):
            decode(generator)
    elif fault in (Fault.NO_MEMORY, Fault.NO_MEMORY_INVALID):
        with pytest.raises(torch.OutOfMemoryError):
            decode(generator)
        assert device.allocator.emptied == 1
    else:
        check_same(decode(generator), plain(lm))
    check_idle(device, leaked)
    warned = [record.getMessage() for record in caplog.records]
    captures = device.captures
    check_same(decode(generator, 1), plain(lm, 1))
    if fault in (Fault.HOST_READ, Fault.CODE, Fault.OTHER_THREAD, Fault.INSTANTIATE):
        assert len(warned) == 1 and "continues without CUDA graphs" in warned[0]
        assert device.captures == captures
    else:
        assert not warned and device.captures > captures
    check_idle(device, leaked)


@pytest.mark.parametrize("forward", [0, 1, 2, 3, 9, 30])
def test_an_error_of_the_model_leaves_no_pool(patch, lm, forward):
    """The error comes in the prefill, a warm-up, a capture, or not at all, since a replay runs no model."""
    device, generator, calls = patch(NEW), generator_of(lm), []

    def fail(*_):
        calls.append(1)
        if len(calls) == forward + 1:
            raise ZeroDivisionError

    hook = lm.register_forward_pre_hook(fail)
    try:
        decode(generator)
        assert len(calls) <= forward
    except ZeroDivisionError:
        pass
    finally:
        hook.remove()
    check_idle(device)
    check_same(decode(generator, 1), plain(lm, 1))
    check_idle(device)


def test_a_model_that_reads_numbers_on_the_host(patch, caplog):
    """Mixtral selects experts on the host; its error names the operation where the run has to end."""
    torch.manual_seed(0)
    lm = MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SIZES)).eval().requires_grad_(False)
    lm.set_experts_implementation("eager")
    device = patch(NEXT)
    check_same(decode(generator_of(lm)), plain(lm))
    assert "continues without CUDA graphs" in caplog.text and device.captures == 1
    check_idle(device)
    patch(OLD)
    with pytest.raises(RunError, match=f"CUDA graph \\({NOT_PERMITTED}\\)"):
        decode(generator_of(lm))


def test_dropped_graphs_are_the_least_recently_used(patch):
    """The pool keeps a graph at all times; a shape that comes back is recorded without another warm-up."""
    device, x, ran = patch(NEW), torch.zeros(9, dtype=torch.long), []
    kept = Graphs(CudaRecorder("cuda"))

    def run(shape):
        def step():
            ran.append(shape)
            x[shape].add_(1)

        kept.run(shape, step)

    for shape in (0, 0, 1, 1, 2, 2, 3, 3, 0, 4, 4):
        run(shape)
    assert len(device.graphs) == graphs.KEPT_GRAPHS and len(ran) == 10 and device.use_counts == [4]
    run(0)
    assert len(ran) == 10  # still recorded, because it was used after 1
    run(1)
    assert len(ran) == 11 and device.captures == 6 and device.use_counts == [4]
    assert x.tolist() == [4, 3, 2, 2, 2, 0, 0, 0, 0]


FAULTS = st.dictionaries(
    st.integers(0, 9), st.tuples(st.sampled_from(list(Fault)), st.integers(0, 60)), max_size=4
)


@settings(
    derandomize=True,
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(version=st.sampled_from([OLD, NEW, NEXT]), faults=FAULTS)
def test_any_failures(patch, lm, version, faults):
    """After any failure, the responses are right, and the allocator works unless the run has ended."""
    device, generator = patch(version, faults), generator_of(lm)
    for seed in range(2):
        try:
            check_same(decode(generator, seed), plain(lm, seed))
        except RunError:
            assert version == OLD
            return
        except (torch.OutOfMemoryError, KeyError):
            pass
        assert not device.graphs and not device.allocator.captures_underway
        assert version == NEW or not device.use_counts
        torch.cuda.empty_cache()
        assert len(device.allocator.pools) == len(device.use_counts) <= len(faults)
