"""Tests the adapter of vLLM with the fake engine, beyond the contract of all backends (test_backends.py).

The fake is compared with vLLM in tests/vllm, where the real engine is tested too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ppo_ds.errors import RunError, UserError
from ppo_ds.models.lora import add_adapters, checkpoint_names, plain_weights
from ppo_ds.rollout.keys import VLLMConfig
from ppo_ds.rollout.vllm import CHECK_EVERY, VLLMGenerator
from ppo_ds.rollout.vllm_support import slot_rank
from tests.support import fake_vllm

V, EOS = 40, 1


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    fake_vllm.install(monkeypatch)


def model(seed=0, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, head_dim=32, initializer_range=0.5, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def make(tokenizer):
    """Returns a function that starts an engine for a model; tokens from 3 on are a, b, c, ..."""

    def start(lm, settings=None, temperature=1.0, longest=64, **arguments):
        with torch.random.fork_rng():
            return VLLMGenerator(
                lambda: lm,
                tokenizer=tokenizer([chr(97 + i) for i in range(V - 3)]),
                token_budget=100,
                settings=settings or VLLMConfig(),
                kv_cache=2**20,
                longest=longest,
                temperature=temperature,
                **arguments,
            )

    return start


def fake_group(**changes):
    """Returns a group of ranks, of which only this one exists; its engines share no memory."""
    return SimpleNamespace(**dict(rank=0, ranks=["none"], barrier=lambda: None, any=bool) | changes)


def weights_of(lm):
    return iter(lm.named_parameters())  # tied weights once, as HybridActor.weights


def largest_gap(lm, rollout):
    """Returns the largest difference between the log-probs of a rollout and those of a plain forward."""
    gaps = []
    for i, mask in enumerate(rollout.response_mask):
        row, count = rollout.ids[i][rollout.attention_mask[i]], int(mask.sum())
        with torch.no_grad():
            table = lm(input_ids=row[None]).logits[0].log_softmax(-1)
        expected = table[-count - 1 : -1].gather(1, row[-count:, None])[:, 0]
        gaps.append((rollout.logprobs[i, :count] - expected).abs().max())
    return float(torch.stack(gaps).max())


@pytest.mark.parametrize("tied", [False, True])
def test_each_phase_generates_with_the_weights_that_it_received(make, prompts, sampling, tied):
    first, second = model(0, tie_word_embeddings=tied), model(1, tie_word_embeddings=tied)
    generator, rows = make(first), prompts([3, 4, 5], [6], [7, 8])
    for lm in (first, second, first):
        with generator.loaded(weights_of(lm)):
            assert largest_gap(lm, generator(rows, sampling(9))) < 1e-5
            assert largest_gap(lm, generator(rows, sampling(5))) < 1e-5


def test_the_engine_sleeps_between_phases_and_generates_only_inside_them(make, prompts, sampling):
    """The level is set after the start, since vLLM refuses it on a CPU. The fake's level 2 loses weights."""
    lm, rows = model(), prompts([3, 4, 5], [6])
    generator = make(lm)
    generator.sleep = 2
    for _ in range(2):
        with generator.loaded(weights_of(lm)):
            assert largest_gap(lm, generator(rows, sampling(4))) < 1e-5
        with pytest.raises(AssertionError, match="only inside"):
            generator(rows, sampling(4))
    with pytest.raises(KeyError), generator.loaded(weights_of(lm)):
        raise KeyError
    with pytest.raises(AssertionError, match="only inside"):
        generator(rows, sampling(4))


def test_an_engine_sleeps_from_its_start(make, monkeypatch):
    """Weights, then the cache, wake up for the first generation as for later ones."""
    calls, lm = [], model()

    def noting(name, call):
        def noted(self, *args, **kwargs):
            calls.append((name, *kwargs.get("tags", ())))
            return call(self, *args, **kwargs)

        return noted

    for name in ("__init__", "sleep", "wake_up", "collective_rpc"):
        monkeypatch.setattr(fake_vllm.LLM, name, noting(name, getattr(fake_vllm.LLM, name)))
    on_gpu = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), dtype=torch.float32, is_floating_point=lambda: True
    )
    lm.parameters = lambda recurse=True: iter([on_gpu] * recurse)
    generator = make(lm)
    assert calls == [("__init__",), ("sleep",)] and generator._llm.arguments["enable_sleep_mode"]
    for _ in range(2):
        calls.clear()
        with generator.loaded(weights_of(lm)):
            assert calls == [("wake_up", "weights"), ("collective_rpc",), ("wake_up", "kv_cache")]
        assert calls[3:] == [("sleep",)]
    failure = MagicMock(side_effect=RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62"))
    monkeypatch.setattr(fake_vllm.LLM, "wake_up", failure)
    with pytest.raises(RunError, match=r"^out of memory when vLLM wakes up \(weights\): set a lower rollout"):
        with generator.loaded(weights_of(lm)):
            pass


@pytest.mark.parametrize("steps", [1, 9])
def test_draws_of_the_engine_do_not_change_the_random_state(make, prompts, sampling, monkeypatch, steps):
    """Afterwards the state depends on the number of rows only, not on how the engine schedules them."""
    step = fake_vllm.LLMEngine.step

    def drawing(self):
        torch.rand(7)
        return step(self)

    monkeypatch.setattr(fake_vllm.LLMEngine, "step", drawing)
    lm = model()
    generator = make(lm)
    with generator.loaded(weights_of(lm)):
        torch.manual_seed(5)
        generator(prompts([3, 4, 5], [6]), sampling(steps))
    found = torch.get_rng_state()
    torch.manual_seed(5)
    torch.randint(2**62, (2,))
    assert torch.equal(found, torch.get_rng_state())


def test_every_weight_is_read_even_if_the_engine_stops_early(make, monkeypatch):
    """Reading the weights is a collective with ZeRO-3."""
    lm, read = model(), []
    generator = make(lm)
    monkeypatch.setattr(fake_vllm.LLM, "_reload", lambda self, weights_iterator: next(weights_iterator))
    noted = (read.append(name) or (name, value) for name, value in weights_of(lm))
    with pytest.raises(UserError, match="did not receive"), generator.loaded(noted):
        raise AssertionError("generated with weights that were not loaded")
    assert read == [name for name, _ in weights_of(lm)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_sync_without_some_weights_ends_before_generation(make, tied):
    """The first sync and any later one, whatever the difference to the earlier weights."""
    lm = model(tie_word_embeddings=tied)
    generator = make(lm)
    for left_out in ("model.layers.1.", "model.norm.weight", "model.embed_tokens.weight"):
        some = [(name, value) for name, value in weights_of(lm) if not name.startswith(left_out)]
        missing = [name for name, _ in weights_of(lm) if name.startswith(left_out)]
        with pytest.raises(UserError) as caught, generator.loaded(iter(some)):
            raise AssertionError("generated with earlier weights")
        assert str(caught.value).startswith(
            f"rollout.backend=vllm: the engine did not receive {len(missing)} of {21 - tied} weights of the "
            f"actor ({sorted(missing)[0]}"
        )
        with generator.loaded(weights_of(lm)):
            pass


def test_names_of_the_weights_of_a_mixture_with_adapters(tmp_path):
    """They are those that an export writes: experts have names of their own, and adapters none."""
    config = MixtralConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    lm = MixtralForCausalLM(config)
    lm.save_pretrained(tmp_path)
    wanted = set(load_file(tmp_path / "model.safetensors"))
    assert checkpoint_names(lm) == wanted and any("experts.3." in name for name in wanted)
    plain = checkpoint_names(model())
    adapted = get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert checkpoint_names(adapted.get_base_model()) == plain


@pytest.mark.parametrize("stops", [(), ("dc",)])
def test_ranks_of_a_group_generate_the_rows_of_all_and_keep_their_own(make, prompts, sampling, stops):
    lm = model()
    parts = [prompts([3, 4, 5], [6]), prompts([7], [8, 9, 10], [3, 4, 5])]
    options, seeds, alone = sampling(9, stop_strings=stops), (11, 12), []
    for part, seed in zip(parts, seeds, strict=True):
        generator = make(lm)
        torch.manual_seed(seed)
        with generator.loaded(weights_of(lm)):
            alone.append(generator(part, options))
    sent = []  # the rows that each rank passes to the others
    for part, seed in zip(parts, seeds, strict=True):
        group = fake_group(gather_objects=lambda rows: [sent.append(rows) or rows])
        generator = make(lm, group=group)
        torch.manual_seed(seed)
        with generator.loaded(weights_of(lm)):
            generator(part, options)
    for rank, part in enumerate(parts):
        generator = make(lm, group=fake_group(rank=rank, gather_objects=lambda rows: sent))
        with generator.loaded(weights_of(lm)):
            together = generator(part, options)
        assert torch.equal(together.ids, alone[rank].ids)
        assert torch.allclose(together.logprobs, alone[rank].logprobs, atol=1e-5)


def test_a_group_stops_at_the_same_step_once_one_rank_must_stop(make, prompts, sampling, monkeypatch):
    lm, steps, asked = model(), [], []
    group = fake_group(
        gather_objects=lambda rows: [rows], any=lambda flag: asked.append(flag) or len(asked) == 3
    )
    generator = make(lm, longest=300, group=group)
    step = fake_vllm.LLMEngine.step
    monkeypatch.setattr(fake_vllm.LLMEngine, "step", lambda self: steps.append(1) or step(self))
    with generator.loaded(weights_of(lm)):
        rollout = generator(prompts([3, 4, 5], [6]), sampling(200))
        assert asked == [False] * 3 and len(steps) == 2 * CHECK_EVERY and len(rollout) == 2
        asked.append(None)
        assert generator(prompts([3], [6]), sampling(2)).response_lengths.tolist() == [2, 2]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_group_generates_once_no_rank_has_another_collective(make, monkeypatch, on_gpu):
    """With NCCL, a collective of the trainer and one of vLLM could each wait for the other."""
    lm, calls = model(), []
    generator = make(lm, group=fake_group(barrier=lambda: calls.append("barrier")))
    calls.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))

    def weights():
        yield from weights_of(lm)
        calls.append("gathered")  # by a collective of the trainer

    with generator.loaded(weights()):
        assert calls == ["gathered", *(["synchronize"] if on_gpu else []), "barrier"]


def test_log_probs_of_greedy_responses_at_another_temperature_are_unknown(make, prompts, sampling):
    lm = model()
    rows, generator = prompts([3, 4, 5], [6]), make(lm, temperature=0.7)
    with generator.loaded(weights_of(lm)):
        greedy = generator(rows, sampling(5, temperature=0.7, top_k=1))
        assert greedy.logprobs[greedy.response_mask].isnan().all()
    generator = make(lm)
    with generator.loaded(weights_of(lm)):
        same = generator(rows, sampling(5, top_k=1))
    assert torch.equal(same.ids, greedy.ids) and largest_gap(lm, same) < 1e-5


def test_minimum_length_and_its_log_probs(make, prompts, sampling):
    """The log-probs are those of the whole distribution, although end tokens cannot be drawn."""
    lm, stop_ids = model(), tuple(range(3, V, 2))
    generator = make(lm)
    with generator.loaded(weights_of(lm)):
        rollout = generator(
            prompts([3, 4, 5], [6], [7, 8], limits=[9, 2, 9]),
            sampling(9, min_new_tokens=4, stop_token_ids=stop_ids),
        )
    lengths = rollout.response_lengths.tolist()
    assert lengths[1] == 2 and min(lengths[0], lengths[2]) >= 5
    assert largest_gap(lm, rollout) < 1e-5


# -- LoRA adapters -------------------------------------------------------------------------------


def adapted(rank=2, name="q_proj"):
    lm = model()
    add_adapters(lm, rank=rank, alpha=6.0, targets=[name, "down_proj"], seed=0, key="actor.lora")
    return lm


def base_of(lm):
    return ((weight.name, weight.merged("cpu", False)) for weight in plain_weights(lm))


def adapters_of(lm):
    return ((name, parameter) for name, parameter in lm.named_parameters() if ".lora_" in name)


def change(lm, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in adapters_of(lm):
            parameter.normal_(std=0.3)


def refused(weights):
    raise AssertionError("the base was read again")
    yield


@pytest.mark.parametrize("sleep", [0, 1, 2])
def test_the_base_is_sent_again_only_if_sleep_has_freed_it(make, prompts, sampling, sleep):
    lm, rows = adapted(), prompts([3, 4, 5], [6], [7, 8])
    generator = make(lm)
    generator.sleep = sleep
    assert generator.adapter_slot and generator.merges_because is None
    arguments = generator._llm.llm_engine
    assert arguments.max_lora_rank == 8
    for seed in range(3):
        change(lm, seed)
        base = base_of(lm) if seed == 0 or sleep == 2 else refused(lm)
        with generator.loaded(base, adapters_of(lm)):
            assert largest_gap(lm, generator(rows, sampling(9))) < 1e-5
    assert len(generator._llm.syncs) == (3 if sleep == 2 else 1)
    assert len(generator._llm.llm_engine.adapted) == 1


def test_adapters_in_bf16_need_no_rounding_of_the_base(make):
    """The engine's base keeps its bits, which merged weights would change."""
    lm = adapted().to(torch.bfloat16)
    change(lm, 1)
    generator, before = make(lm), dict(base_of(lm))
    with generator.loaded(base_of(lm), adapters_of(lm)):
        held = dict(generator._llm.llm_engine.model.named_parameters())
        assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
    merged = {weight.name: weight.merged("cpu") for weight in plain_weights(lm)}
    assert not all(torch.equal(merged[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("rank", "actor.lora.rank=513 is above vLLM's limit, 512"),
        ("class", "vLLM has no adapters for LlamaForCausalLM"),
        ("unknown", "While loading, expected target modules in"),
        ("ignored", "it would ignore those of model.layers.0.mlp.down_proj (4 layers)"),
    ],
)
def test_adapters_that_vllm_does_not_apply_are_merged(make, prompts, sampling, monkeypatch, case, reason):
    lm, rows = adapted(rank=513 if case == "rank" else 2), prompts([3, 4, 5], [6])
    add = fake_vllm.LLMEngine.add_lora

    def failing(self, request):
        if case == "unknown":
            raise ValueError("While loading, expected target modules in {'o'} but received ['q_proj'].")
        add(self, request)
        self.lora_manager.modules.clear()
        return True

    if case in ("unknown", "ignored"):
        monkeypatch.setattr(fake_vllm.LLMEngine, "add_lora", failing)
    elif case == "class":
        monkeypatch.setattr(fake_vllm, "supports_lora", lambda model: False)
    generator = make(lm)
    assert generator.adapter_slot is None and generator.merges_because.startswith(reason)
    for seed in range(2):
        change(lm, seed)
        merged = ((weight.name, weight.merged("cpu")) for weight in plain_weights(lm))
        with generator.loaded(merged):
            assert largest_gap(lm, generator(rows, sampling(9))) < 1e-5


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (8, 8), (65, 128), (512, 512), (513, None)])
def test_memory_for_an_adapter(rank, slot):
    assert slot_rank(rank) == slot


# -- the start of an engine ------------------------------------------------------------------------


def test_the_start_of_an_engine_restores_the_process(make, monkeypatch):
    """vLLM replaces torch.set_num_threads and preloads libraries on a CPU, and on a GPU the other two."""
    start, set_num_threads = fake_vllm.LLM.__init__, torch.set_num_threads

    def starting(self, *args, **kwargs):
        monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
        monkeypatch.setenv("LD_PRELOAD", "libgomp.so")
        torch.backends.cuda.enable_cudnn_sdp(False)
        gc.freeze()
        start(self, *args, **kwargs)

    monkeypatch.setattr(fake_vllm.LLM, "__init__", starting)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    make(model())
    assert torch.set_num_threads is set_num_threads and "LD_PRELOAD" not in os.environ
    assert torch.backends.cuda.cudnn_sdp_enabled() and gc.get_freeze_count() == 0


def test_the_start_of_an_engine_restores_the_stream(make, monkeypatch):
    """On a GPU, vLLM replaces the stream of the process, with which DeepSpeed synchronizes its own."""
    calls = []
    stream = SimpleNamespace(wait_stream=lambda other: calls.append(("wait for", other)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: calls[0][1] if calls else stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda new: calls.append(("set", new)))
    start = fake_vllm.LLM.__init__

    def starting(self, *args, **kwargs):
        torch.cuda.set_stream("of vLLM")
        start(self, *args, **kwargs)

    monkeypatch.setattr(fake_vllm.LLM, "__init__", starting)
    make(model())
    assert calls == [("set", "of vLLM"), ("wait for", "of vLLM"), ("set", stream)]


@pytest.mark.parametrize(("on_gpu", "found"), [(False, "0"), (True, None)])
def test_vllm_chooses_its_model_runner_on_a_gpu_only(make, monkeypatch, on_gpu, found):
    """The first model runner, which runs on a CPU, draws row by row if requests have seeds."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    make(model())
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == found


def test_each_start_with_a_model_gives_vllm_the_same_path(make, monkeypatch, tmp_path):
    """vLLM's cache of compiled kernels distinguishes models by their path."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    paths = [
        Path(make(lm)._llm.arguments["model"]) for lm in (model(), model(), model(tie_word_embeddings=True))
    ]
    assert paths[0] == paths[1] != paths[2] and {path.parent for path in paths} == {tmp_path / "ppo_ds"}
    assert json.loads((paths[2] / "config.json").read_text())["tie_word_embeddings"]


def test_the_options_of_an_engine(make):
    tried = make(model(), VLLMConfig(tensor_parallel=2), temperature=0.7)._llm.arguments
    wanted = {
        "tensor_parallel_size": 2,
        "kv_cache_memory_bytes": 2**20,
        "max_model_len": 64,
        "dtype": "float32",
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy",
        "distributed_executor_backend": "external_launcher",
        "enable_sleep_mode": False,
    }
    assert {name: tried[name] for name in wanted} == wanted


def test_settings_that_vllm_does_not_support_are_one_line(make, monkeypatch):
    for reason, line in (
        ("no such\n layer", "rollout.backend=vllm: vLLM cannot decode this model (no such layer)"),
        (
            "To serve at least one request,\n 1 GiB is needed.",
            "rollout.vllm.kv_cache_gb: the key-value cache does not hold one prompt and response of 64 "
            "tokens; raise it (vLLM: To serve at least one request, 1 GiB is needed.)",
        ),
    ):

        def fail(self, *args, reason=reason, **kwargs):
            raise ValueError(reason)

        monkeypatch.setattr(fake_vllm.LLM, "__init__", fail)
        with pytest.raises(UserError) as caught:
            make(model())
        assert str(caught.value) == line


def test_names_of_shared_memory_are_removed_once_all_engines_have_started(make, monkeypatch, tmp_path):
    files = [tmp_path / f"-tp:0-[2-3]-cpushm_{rank}" for rank in range(2)]
    others = [tmp_path / "-tp:0-[0-1]-cpushm_0", tmp_path / "other"]  # another group may still be starting
    for file in files + others:
        file.touch()
    there = []  # the files when the ranks meet
    group = fake_group(ranks=[2, 3], barrier=lambda: there.extend(file.exists() for file in files))
    monkeypatch.setattr("ppo_ds.rollout.vllm.SHARED_MEMORY", tmp_path)
    make(model(), group=group)
    assert there == [True, True] and sorted(tmp_path.iterdir()) == sorted(others)


def test_shared_memory_of_another_run_is_one_line(make, monkeypatch):
    def fail(self, *args, **kwargs):
        raise RuntimeError(reason)

    monkeypatch.setattr(fake_vllm.LLM, "__init__", fail)
    reason = "create shm in SHMManager failed. errno: 17"
    with pytest.raises(UserError, match=r"^rollout.vllm.tensor_parallel=2: .* delete /dev/shm/-tp:\*$"):
        make(model(), VLLMConfig(tensor_parallel=2))
    reason = "another reason"
    with pytest.raises(RuntimeError, match="another reason"):
        make(model())


def test_a_broken_installation_is_one_line(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"^rollout.backend=vllm: vLLM cannot be imported \(.*; install it"):
        make(model())
