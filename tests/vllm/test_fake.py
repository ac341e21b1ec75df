"""The fake vLLM of the ordinary tests has the signatures of the real one, and loses weights as it does."""

import dataclasses
import enum
import inspect

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import fake_vllm

PROMPTS = ((3, 5, 7, 9), (11, 13), (20,) * 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama and the directory where it is saved."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    lm, path = LlamaForCausalLM(config).eval(), tmp_path_factory.mktemp("model")
    with torch.no_grad():  # a distribution that is far from uniform
        lm.lm_head.weight.mul_(20)
    lm.save_pretrained(path)
    return lm, str(path)


@pytest.fixture
def llm(model):
    """An engine with the weights of ``model``."""
    lm, path = model
    llm = fake_vllm.LLM(path, dtype="float32", max_model_len=32, logprobs_mode="processed_logprobs")
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(lm.named_parameters())})
    return llm


def decode(llm, **sampling):
    params = [fake_vllm.SamplingParams(seed=i, logprobs=0, **sampling) for i in range(len(PROMPTS))]
    return llm.generate([{"prompt_token_ids": list(row)} for row in PROMPTS], params, use_tqdm=False)


def test_weights_that_are_not_given_stay_and_sleep_discards_all(model, llm):
    lm, _ = model
    before = decode(llm, temperature=0.0, max_tokens=8)
    changed = [(name, tensor * 1.5) for name, tensor in lm.named_parameters() if "lm_head" not in name]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(changed)})
    assert "lm_head.weight" not in llm.syncs[-1]
    head = dict(llm.llm_engine.model.named_parameters())["lm_head.weight"]
    assert torch.equal(head, lm.lm_head.weight)
    llm.sleep(2)
    with pytest.raises(RuntimeError, match="asleep"):
        decode(llm, temperature=0.0, max_tokens=8)
    llm.llm_engine.abort_request(list(llm.llm_engine.requests))
    llm.wake_up()
    assert head.isnan().all()
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(lm.named_parameters())})
    after = decode(llm, temperature=0.0, max_tokens=8)
    assert [out.outputs[0].token_ids for out in after] == [out.outputs[0].token_ids for out in before]


def parameters(function):
    return [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "kwargs")]


def test_signatures_are_those_of_vllm():
    """Every parameter of the fake exists in vLLM with the same kind and default, in the same order."""
    vllm = pytest.importorskip("vllm", reason="vllm is not installed; make test-vllm installs it")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    llm_calls = ("__init__", "generate", "collective_rpc", "sleep", "wake_up", "reset_prefix_cache")
    engine_calls = ("add_request", "abort_request", "step", "has_unfinished_requests", "add_lora")
    engine_calls += ("remove_lora",)
    pairs = ((fake_vllm.LLM, vllm.LLM, llm_calls), (fake_vllm.LLMEngine, LLMEngine, engine_calls))
    for fake, real, names in pairs:
        for name in names:
            compare(parameters(getattr(fake, name)), parameters(getattr(real, name)), name)
    for fake, real in (
        (fake_vllm.SamplingParams, vllm.SamplingParams),
        (fake_vllm.CompletionOutput, CompletionOutput),
        (fake_vllm.RequestOutput, RequestOutput),
        (fake_vllm.Logprob, Logprob),
    ):
        # objects of these classes are created with keyword arguments
        named = {parameter.name: parameter for parameter in parameters(real)}
        known = [named[own.name] for own in parameters(fake)]
        renamed = [p.replace(default=value(p.default)) for p in known]
        own = [p.replace(default=value(p.default)) for p in parameters(fake)]
        compare(own, renamed, fake.__name__, positional=False)
    from vllm.sampling_params import RequestOutputKind

    assert {kind.name: kind.value for kind in fake_vllm.RequestOutputKind} == {
        kind.name: kind.value for kind in RequestOutputKind
    }
    assert fake_vllm.ENGINE_ARGUMENTS <= {argument.name for argument in dataclasses.fields(EngineArgs)}
    assert fake_vllm.__version__ == vllm.__version__.split("+")[0]


def value(default):
    """Returns the name of an enum's member, so that members of the two modules can be compared."""
    return default.name if isinstance(default, enum.Enum) else default


def compare(fake, real, where, positional=True):
    """Asserts that the parameters ``fake`` are among ``real`` in the same order, with kinds and defaults.

    Positional parameters must also be the first of ``real``, unless ``positional`` is False.
    """
    names = [own.name for own in fake]
    assert names == [theirs.name for theirs in real if theirs.name in names], where
    if positional:
        first = [own.name for own in fake if own.kind is own.POSITIONAL_OR_KEYWORD]
        assert first == [theirs.name for theirs in real][: len(first)], where
    for own in fake:
        (theirs,) = (parameter for parameter in real if parameter.name == own.name)
        assert (own.kind, own.default) == (theirs.kind, theirs.default), f"{where}: {own.name}"
