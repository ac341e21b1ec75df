"""Tests the generator that `rollout.backend` selects, its parity check and its banner lines."""

from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.assemble import generator as generators
from ppo_ds.ppo.health import ParityError
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.rollout.static import StaticGenerator
from tests.config.commands import MINIMAL, complaints, compose

composed = cache(compose)
KINDS = {StaticGenerator: "static", HFGenerator: "hf"}
LM = LlamaForCausalLM(
    LlamaConfig(vocab_size=16, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
)


class Actor:
    """Stands in for an actor whose model is available in generation mode only."""

    def __init__(self):
        self.lockstep_max, self.inside = None, False

    @contextmanager
    def generation_mode(self):
        self.inside = True
        yield
        self.inside = False

    @property
    def lm(self):
        assert self.inside
        return LM


class Source:
    """Stands in for a source of five prompts; a batch is a list of the numbers of its prompts."""

    batch = list

    def __len__(self):
        return 5


@pytest.fixture
def built(monkeypatch):
    """Builds a generator and returns (backend, banner lines, calls of the parity check).

    A call is recorded as (backend, prompts, a random number drawn in the call). ``gaps`` maps backends to the
    simulated results of the check.
    """

    def run(*arguments, gaps=None, other_ranks=()):
        tried, notes = [], []

        def gap(few, *, actor, generator, sampling, token_budget):
            assert token_budget == 66
            tried.append((KINDS[type(generator)], few, torch.rand(()).item()))
            return (gaps or {}).get(tried[-1][0], (0.0, 0.0))

        monkeypatch.setattr(generators, "parity_gap", gap)
        generator, *_ = generators.build_generator(
            composed(
                *MINIMAL,
                "memory.rollout_tokens=77",
                "memory.score_tokens=66",
                "actor.model.dtype=fp32",
                *arguments,
            ),
            SimpleNamespace(rank=1, gather_objects=lambda item: [item, *other_ranks]),
            SimpleNamespace(tokenizer="tokenizer", source=Source(), longest_prompt=20),
            Actor(),
            SamplingParams(8, 0, 1.0, 1.0, 0, stop_token_ids=(), stop_strings=()),
            lambda: False,
            notes.append,
        )
        assert (generator.token_budget, generator.tokenizer) == (77, "tokenizer")
        return KINDS[type(generator)], notes, tried

    return run


def test_auto_chooses_static(built):
    backend, notes, tried = built()
    assert (
        backend == "static"
        and notes == ["decode     static: the fastest that agrees with training"]
        and len(tried) == 1
    )


def test_auto_warns_if_static_disagrees(built):
    backend, (warning, line), tried = built(gaps={"static": (0.25, 1.5)})
    assert backend == "hf" and [name for name, *_ in tried] == ["static", "hf"]
    assert (
        warning.startswith(
            "warning    rollout.backend=auto passes over static: generation and training disagree"
        )
        and "0.25 nats" in warning
    )
    assert line == "decode     hf: the fastest that agrees with training"


def test_auto_reports_why_static_is_unavailable(built, monkeypatch):
    monkeypatch.setattr(
        "ppo_ds.rollout.decoding.refusal",
        lambda lm, longest: f"a window shorter than {longest} tokens" if lm is LM else None,
    )
    backend, notes, tried = built()
    assert backend == "hf" and [name for name, *_ in tried] == ["hf"]
    assert notes == [
        "decode     hf: the fastest that agrees with training; not static: a window shorter than 28 tokens"
    ]


def test_a_backend_that_is_unavailable_on_one_rank_is_used_on_none(built):
    assert built(other_ranks=("no room on rank 2",))[1][0].endswith("not static: no room on rank 2")


@pytest.mark.parametrize("backend", ["static", "hf"])
def test_a_named_backend(built, backend):
    assert built(f"rollout.backend={backend}")[:2] == (
        backend,
        [f"decode     {backend}: rollout.backend={backend}"],
    )
    with pytest.raises(ParityError, match=f"differ by 2 nats.*rollout.backend={backend}"):
        built(f"rollout.backend={backend}", gaps={backend: (2.0, 3.0)})


@pytest.mark.parametrize(
    ("samples", "prompts"),
    [(1, [1, 2, 3, 4, 0, 1, 2, 3]), (2, [1, 1, 2, 2, 3, 3, 4, 4]), (8, [1, 1, 2, 2, 3, 3, 4, 4])],
)
def test_the_parity_check_samples_a_prompt_as_often_as_steps_do(built, samples, prompts):
    """The simulated rank is rank 1, which starts with prompt 1."""
    ((_, few, _),) = built(f"rollout.samples_per_prompt={samples}")[2]
    assert few == prompts


def test_the_parity_check_draws_the_same_numbers_at_each_start(built):
    """The numbers do not depend on earlier draws, such as for a new critic's head.

    Therefore a resumed run chooses the same backend.
    """
    draws = set()
    for seed in (5, 6):
        torch.manual_seed(seed)
        draws |= {drawn for _, _, drawn in built(gaps={"static": (1.0, 1.0)})[2]}
    assert len(draws) == 1
    assert built("run.seed=3")[2][0][2] not in draws


def test_an_unknown_backend_is_refused():
    assert complaints(*MINIMAL, "rollout.backend=onnx") == [
        "rollout.backend=onnx: must be one of auto, static, hf, vllm"
    ]
