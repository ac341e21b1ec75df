"""Simulates one rank of a world of GPUs: the engines of an experiment, with real sizes, on the fake device.

    python -m tests.gpu_sim.fake_world EXPERIMENT RANKS [--set KEY=VALUE ...] [--layers N] [--json FILE]

The actor, the critic, the reference and the reward models are built as in a run, but without weights, and run
one PPO step: scoring, the switch to generation, decoding, and an update. DeepSpeed's engines are real. The
device (fake_cuda.py) computes nothing and counts the bytes of its tensors. The process group is torch's
"fake" one, in which this rank is the last. Numbers that ranks exchange are those of this rank, or zeros.

Not simulated: the allocator of CUDA, workspaces of kernels and of NCCL, temporary tensors inside a kernel,
and the engine of vLLM, in whose place the weights are only read.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

from tests.gpu_sim.fake_cuda import CUDA, FakeCuda, Stream, aten, fake_cuda

os.environ["DS_ACCELERATOR"] = "cuda"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import utils as zero_utils
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from launch.cli import load_config
from ppo_ds.assemble.algorithm import experience_maker, learner, parity_monitor
from ppo_ds.assemble.engines import frozen_engine
from ppo_ds.assemble.ppo_models import choose_layouts, plan_generation
from ppo_ds.assemble.roles import build_actor, build_critic, build_reference, critic_start, ppo_needs
from ppo_ds.config.schema import PPOConfig, has_critic, reward_models, rollout_size, uses_reference
from ppo_ds.config.sections.models import FrozenZeroConfig, ModelConfig
from ppo_ds.distributed.sequence_group import SequenceGroup
from ppo_ds.distributed.world import Waiting, World
from ppo_ds.models import loading, policy, value
from ppo_ds.models.linear import install_linears
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.planning.budgets import resolve, token_budgets, with_numbers
from ppo_ds.planning.ppo_memory import estimate
from ppo_ds.planning.run_memory import Hardware
from ppo_ds.ppo import model_outputs
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.run.health import Health
from ppo_ds.run.microbatches import forward_rows
from ppo_ds.tools.doctor.model_shapes import plan_models
from ppo_ds.tools.doctor.report import Report
from ppo_ds.types import Experience, Prompts, Rollout
from tests.gpu_sim.drives.decoding import Tokenizer, graphs_recorded, static_generator
from tests.support.hub_models import hub_folders

GPU = int(79.2 * 2**30)  # bytes of an H100


class Memory:
    """Counts the bytes of the live tensors of the device, and their peak in each phase."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.phases: dict[str, int] = {}
        self._storages: dict[int, Any] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Stands in for PhaseTimer and records the peak of the phase; an outer phase includes inner ones."""
        outer, self.peak = self.peak, self.live
        yield
        self.phases[phase] = max(self.phases.get(phase, 0), self.peak)
        self.peak = max(self.peak, outer)


class CountingCuda(FakeCuda):
    """The simulated device with a Memory."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.answer = lambda source: torch.zeros(
            source.shape, dtype=source.dtype, device="cpu"
        )  # no overflow

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        made = super().run(func, *args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                self.memory.add(tensor)
        return made


def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Stands in for Module._apply, which swaps fake tensors and fails if something refers to them.

    As in torch, tensors that do not change stay the same objects, and tied ones stay tied.
    """
    made: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is not None and old not in made:
                    with torch.no_grad():
                        new = function(old)
                    changed = isinstance(old, nn.Parameter) and new is not old
                    made[old] = nn.Parameter(new, old.requires_grad) if changed else new
                tensors[name] = None if old is None else made[old]
    return module


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands in for scaled_dot_product_attention: calls the kernels that torch chooses on a GPU.

    The CPU build would choose the formula, which materializes the probabilities. A mask or fp32 rules out
    FlashAttention, and the other kernel takes neither boolean masks nor grouped heads.
    """
    if attn_mask is None and query.dtype != torch.float32:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1, output_size=query.shape[1]) for x in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    kept = query.requires_grad or key.requires_grad
    return efficient(query, key, value, attn_mask, kept, dropout_p, is_causal, scale=scale)[0]


class Done:
    """Stands in for the handle of an asynchronous collective."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    is_completed = wait


def without_files(auto_class: Any, section: ModelConfig, *, config: Any, key: str) -> tuple[Any, dict]:
    """Stands in for from_pretrained: the model has no values, and all of its weights count as read."""
    implementation = loading.attention(section, key)
    with CUDA:
        model = auto_class.from_config(
            config, dtype=loading.torch_dtype(section.dtype), attn_implementation=implementation
        )
    install_linears(model)
    loading.use_fused_functions(model)
    return model, {"missing_keys": [], "mismatched_keys": []}


@contextmanager
def fake_world(ranks: int, parts: int = 1) -> Iterator[tuple[World, CountingCuda]]:
    """Provides the last of ``ranks`` ranks, in nodes of 8. It sees one device, its own.

    ``parts`` ranks divide rows (memory.sequence_parallel).
    """
    rank, local = ranks - 1, min(ranks, 8)
    launched = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local}
    os.environ |= {name: str(number) for name, number in launched.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    device = CountingCuda()
    cuda: dict[str, Any] = {
        "set_device": lambda index: None,
        "default_stream": lambda index=None: Stream(device),
        **{
            f"{most}memory_{kind}": lambda index=None: 0
            for most in ("", "max_")
            for kind in ("allocated", "reserved")
        },
        "reset_peak_memory_stats": lambda index=None: None,
        "mem_get_info": lambda index=None: (GPU - device.memory.live, GPU),
    }
    accelerator: dict[str, Any] = {
        "is_available": lambda self: True,
        "device_count": lambda self: 1,
        "total_memory": lambda self, index=None: GPU,
        "range_push": lambda self, *args, **kwargs: None,
        "range_pop": lambda self, *args, **kwargs: None,
    }
    collectives: dict[str, Any] = {
        "all_reduce": lambda *args, **kwargs: Done(),
        "all_gather_object": lambda found, item, group=None: found.__setitem__(slice(None), [item] * ranks),
        "barrier": lambda *args, **kwargs: None,
    }
    deepspeed.ops.__compatible_ops__ = {}
    with ExitStack() as stack:
        stack.enter_context(fake_cuda(device))
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        stack.enter_context(mock.patch.multiple(type(get_accelerator()), **accelerator))
        stack.enter_context(mock.patch.multiple(dist, **collectives))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", apply))
        stack.enter_context(mock.patch.object(nn.functional, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        for module in (policy, value):
            stack.enter_context(mock.patch.object(module, "from_pretrained", without_files))
        # DeepSpeed compares lists with those that rank 0 has sent
        sent = {"assert_lst_len_same_as_other_ranks": lambda numbers: None, "get_lst_from_rank0": list}
        stack.enter_context(mock.patch.multiple(zero_utils, **sent))
        stack.enter_context(mock.patch.object(model_outputs, "all_gather_rows", rows_of_all_ranks))
        deepspeed.init_distributed(verbose=False)
        group = SequenceGroup(rank, ranks, parts, timedelta(minutes=1)) if parts > 1 else None
        nodes = SimpleNamespace(ranks=local)
        yield World(rank, ranks, 0, CUDA, nodes, Waiting(CUDA), sequence=group), device


def rows_of_all_ranks(rows: Any, world: World) -> Any:
    """Stands in for the gather of rows; all ranks have the rows of this one."""
    return rows.select(torch.arange(len(rows)).repeat(world.size))


def rollout_of(config: PPOConfig, rows: int, vocabulary: int) -> Rollout:
    """Makes rows of the maximum length."""
    prompt, width = config.data.max_prompt_tokens, config.sampling.max_new_tokens
    return Rollout(
        ids=torch.randint(vocabulary, (rows, prompt + width)),
        attention_mask=torch.ones(rows, prompt + width, dtype=torch.bool),
        response_mask=torch.ones(rows, width, dtype=torch.bool),
        finished=torch.ones(rows, dtype=torch.bool),
        limits=torch.full((rows,), width),
        logprobs=torch.zeros(rows, width),
        metadata=({},) * rows,
    )


def experience_of(rollout: Rollout) -> Experience:
    """Makes an experience with all columns; the numbers have no meaning."""
    tokens, states = rollout.logprobs, torch.zeros(len(rollout), rollout.logprobs.shape[1] + 1)
    names = ("decode_logprobs", "advantages", "logprobs", "old_logprobs", "ref_logprobs")
    return Experience(
        ids=rollout.ids,
        attention_mask=rollout.attention_mask,
        response_mask=rollout.response_mask,
        finished=rollout.finished,
        weights=torch.ones_like(tokens),
        scores=states[:, 0],
        rewards=states,
        values=states,
        returns=states,
        value_mask=nn.functional.pad(rollout.response_mask, (0, 1), value=True),
        **dict.fromkeys(names, tokens),
    )


def generate(config: PPOConfig, actor: Any, device: CountingCuda, rows: int) -> None:
    """Decodes with the static backend, or with an engine that only reads the weights."""
    phases, sampling = device.memory, config.sampling
    if config.rollout.own_weights:

        @contextmanager
        def engine(weights: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
            for _ in weights:
                pass
            yield

        actor.connect(engine)
        with actor.generation_mode():
            return
    prompt, limit = config.data.max_prompt_tokens, sampling.max_new_tokens
    # every token gathers all weights if the layers are gathered one by one
    steps = 4 if actor.lockstep else limit
    width = prompt + limit - steps
    prompts = Prompts(
        torch.randint(1000, (rows, width)),
        torch.ones(rows, width, dtype=torch.bool),
        torch.full((rows,), steps),
        ({},) * rows,
    )
    chosen = SamplingParams(steps, 0, sampling.temperature, sampling.top_p, sampling.top_k, (2,), ())
    with actor.generation_mode(), phases("generate"), graphs_recorded(device, steps):
        slots = max(1, int(config.memory.rollout_tokens) // (prompt + limit))
        static_generator(actor.lm, Tokenizer(), slots, prompt + limit)(prompts, chosen)


def step(config: PPOConfig, world: World, device: CountingCuda, rows: int) -> dict[str, Any]:
    """Builds the models and runs a PPO step; returns the resident bytes by role and facts."""
    phases, needs, resident = device.memory, ppo_needs(1, 1), {}
    tokenizer = load_tokenizer(config.actor.model.path, key="actor.model.path")
    before = 0

    def note(role: str) -> None:
        nonlocal before
        resident[role], before = phases.live - before, phases.live

    reference = critic = None
    with phases("loading"):
        actor = build_actor(config, world, needs, 1, phases)
        note("actor")
        if uses_reference(config):
            reference = build_reference(config, world, needs, actor)
            note("reference")
        if has_critic(config):
            critic = build_critic(config, critic_start(config, tokenizer), world, needs, 1)
            note("critic")
        rewards = {}
        for key, section in reward_models(config.reward):
            own, zero = ModelConfig(**section), FrozenZeroConfig(**config.reward.get("zero") or {})
            load = lambda own=own, key=key: value.load_reward_model(own, key=f"{key}.path")  # noqa: E731
            rewards[key] = frozen_engine(load, zero, own.dtype, world)[1]
            note(f"{key}.path")
    choose_layouts(config, actor, reference, critic)
    plan = plan_generation(config, actor, critic)
    stop = SimpleNamespace(raise_if_stopped=lambda: None)
    budgets = token_budgets(config, world, Path(tempfile.gettempdir()), {}, lambda numbers: None)
    context = SimpleNamespace(
        world=world, timer=phases, health=Health(10**6), budgets=budgets, stop=stop, report=None
    )
    common = {"actor": actor, "critic": critic}
    trained = {role: model for role, model in common.items() if model is not None}
    maker = experience_maker(config, context, reference=reference, lagged=None, masked_stop_ids=(), **common)
    learn = learner(config, context, parity=parity_monitor(config), **common)
    vocabulary = actor.module.vocab_size
    rollout = rollout_of(config, rows, vocabulary)
    experience = experience_of(rollout_of(config, rows * world.size, vocabulary))
    learn(experience, 0.1, seed=0)  # allocates the moments
    phases.phases = {"loading": phases.phases["loading"]}
    generate(config, actor, device, rows)
    with phases("reward"):
        for model in rewards.values():
            with model.resident():
                forward_rows(
                    lambda ids, mask, width, model=model: model(ids, mask),
                    rollout,
                    maker.forwards.plan(rollout),
                )
    maker.forwards(rollout, critic_only=False)
    learn(experience, 0.1, seed=0)
    states = [model.engine.basic_optimizer.state for model in trained.values()]
    moments = sum(
        leaf.nbytes for leaf in tree_leaves([list(state.values()) for state in states]) if is_moment(leaf)
    )
    packed = {role: model.module.packed for role, model in trained.items()}
    return {"resident": resident, "moments": moments, "plan": plan, "packed": packed}


def is_moment(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cuda and leaf.dim() > 0


def simulate(experiment: str, ranks: int, settings: list[str], layers: int | None) -> dict[str, Any]:
    """Simulates a step, and returns bytes that were counted and those of the doctor, by role and phase."""
    arguments = [*([f"+experiment={experiment}"] if experiment else []), *settings]
    config = load_config(arguments, world_size=ranks)
    with tempfile.TemporaryDirectory() as folder:
        folders = hub_folders(Path(folder), layers)
        models = {"actor.model": config.actor.model.path}
        models |= {} if config.critic.model.path is None else {"critic.model": config.critic.model.path}
        models |= {key: model["path"] for key, model in reward_models(config.reward)}
        paths = [f"{key}.path={folders[path]}" for key, path in models.items()]
        config = load_config([*arguments, *paths], world_size=ranks)
        shapes = plan_models(
            config, load_tokenizer(config.actor.model.path, key="actor.model.path"), Report()
        )
        hardware = Hardware(ranks, GPU)
        numbers = resolve(
            config, lambda trial: estimate(trial, shapes, hardware), hardware.usable, on_gpu=True
        ).numbers
        config = with_numbers(config, numbers)
        rows = rollout_size(config) // ranks
        doctor = estimate(config, shapes, hardware)
        with fake_world(ranks, config.memory.sequence_parallel) as (world, device):
            facts = step(config, world, device, rows)
    # vLLM's own memory, of which only what stays between two phases is in the estimate of most phases
    outside = dict.fromkeys(doctor.phases, doctor.vllm.between if doctor.vllm else 0)
    if doctor.vllm:
        outside |= {"loading": 0, "switch": doctor.vllm.weights + doctor.vllm.between}
    return facts | {
        "phases": device.memory.phases,
        "doctor": {
            "phases": {phase: peak - outside[phase] for phase, peak in doctor.phases.items()},
            "resident": doctor.resident,
            "moments": {role: engine.moments for role, engine in doctor.engines.items()},
        },
        "budgets": numbers,
        "mixed": device.report.mixed,
        "waits": device.report.waits,
        "operations": device.report.operations.total(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_sim.fake_world", description=__doc__)
    parser.add_argument("experiment")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = simulate(options.experiment, options.ranks, options.settings, options.layers)
    text = json.dumps(found, indent=1)
    print(text) if options.json is None else Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
