"""A module with the parts of vLLM that ppo_ds uses, decoding with a transformers model on the CPU.

The ordinary tests use it through ``install``, because vLLM needs an environment of its own.
tests/vllm/test_fake.py compares its signatures with those of the real module.

As in vLLM on a CPU, a head that is tied to the embedding has a copy of the weights, which a reload changes
only under the head's own name.

Adapters are merged into a copy of the model when they are added. As in vLLM, they are read from the folder of
the request at that time, and layers with names that the model lacks are ignored.

Differences from vLLM: every step runs the whole sequences again, without a cache, and tensor parallelism and
detokenization are not simulated. ``sleep`` overwrites the weights with NaN at level 2, because discarded
memory may hold anything, and decoding while asleep raises. vLLM on a CPU ignores ``sleep``.
"""

from __future__ import annotations

import copy
import enum
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

__version__ = "0.32.0"

# fields of vLLM's EngineArgs that LLM takes as further keyword arguments
ENGINE_ARGUMENTS = {
    "async_scheduling",
    "disable_log_stats",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "distributed_executor_backend",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "generation_config",
    "load_format",
    "logprobs_mode",
    "max_logprobs",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
}
MODULES = ("vllm", "vllm.sampling_params", "vllm.lora.request", "vllm.model_executor.models")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this module the one that ``import vllm`` and imports of its modules return."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, sys.modules[__name__])


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """Sampling options of one request, with vLLM's names, defaults and checks."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self):
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {self.temperature}.")
        if self.top_k < -1:
            raise ValueError(f"top_k must be 0 (disable), or at least 1, got {self.top_k}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, "
                f"got {self.min_tokens}."
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are only supported when detokenize is True.")


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None


class ModelRegistry:
    """Knows all models and their adapters, except those of GPT-NeoX."""

    models: ClassVar[dict[str, Any]] = {
        name: SimpleNamespace(load_model_cls=lambda name=name: name)
        for name in ("LlamaForCausalLM", "GPTNeoXForCausalLM")
    }


def supports_lora(model: str) -> bool:
    return model != "GPTNeoXForCausalLM"


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: None
    outputs: list[CompletionOutput]
    finished: bool


@dataclass
class Request:
    """A request that is being decoded."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    generator: torch.Generator | None
    adapter: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    reason: str | None = None
    stop_reason: int | None = None

    def output(self) -> RequestOutput:
        """Returns all tokens so far, or the last one with RequestOutputKind.DELTA."""
        first = len(self.tokens) - 1 if self.params.output_kind == RequestOutputKind.DELTA else 0
        completion = CompletionOutput(
            index=0,
            text="",
            token_ids=self.tokens[first:],
            cumulative_logprob=None,
            logprobs=None if self.params.logprobs is None else self.logprobs[first:],
            finish_reason=self.reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            self.request_id, None, self.prompt, None, [completion], finished=self.reason is not None
        )


class LLMEngine:
    """Decodes one token of every running request per ``step``; ``LLM`` creates it."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_model_len: int,
        max_num_seqs: int,
        logprobs_mode: str,
        max_lora_rank: int | None,
    ):
        self.model = model
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.logprobs_mode = logprobs_mode
        self.requests: dict[str, Request] = {}
        self.asleep = False
        self.adapted: dict[int, torch.nn.Module] = {}  # the model with each adapter
        self.max_lora_rank = max_lora_rank

    def add_request(
        self,
        request_id: str,
        prompt: dict[str, Any],
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: None = None,
        priority: int = 0,
    ) -> str:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id)}")
        ids = list(prompt["prompt_token_ids"])
        if not ids:
            raise ValueError("The decoder prompt cannot be empty")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of "
                f"{self.max_model_len}. Make sure that `max_model_len` is no smaller."
            )
        generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
        adapter = None if lora_request is None else lora_request.lora_int_id
        assert adapter is None or adapter in self.adapted
        self.requests[request_id] = Request(request_id, ids, params, generator, adapter)
        return request_id

    def add_lora(self, lora_request: LoRARequest) -> bool:
        assert self.max_lora_rank is not None and not self.adapted  # max_loras is 1
        config = PeftConfig.from_pretrained(lora_request.lora_path)
        state = load_file(f"{lora_request.lora_path}/adapter_model.safetensors")
        if config.r > self.max_lora_rank:
            raise ValueError(f"LoRA rank {config.r} is greater than max_lora_rank {self.max_lora_rank}.")
        model = copy.deepcopy(self.model)
        for name, down in state.items():
            layer, _, part = name.removeprefix("base_model.model.").partition(".lora_")
            if part == "A.weight" and layer in dict(model.named_modules()):
                up = state[name.replace("lora_A", "lora_B")]
                weight = model.get_submodule(layer).weight
                weight.data += config.lora_alpha / config.r * up.to(weight.dtype) @ down.to(weight.dtype)
        self.adapted[lora_request.lora_int_id] = model
        known = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in state}
        self.lora_manager = SimpleNamespace(
            modules=dict(model.named_modules()),
            get_adapter={lora_request.lora_int_id: SimpleNamespace(loras=known)}.get,
        )
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return self.adapted.pop(lora_id, None) is not None

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def step(self) -> list[RequestOutput]:
        if self.asleep:
            raise RuntimeError("the engine is asleep")
        running = list(self.requests.values())[: self.max_num_seqs]
        outputs = []
        for request, logits in zip(running, self._next_logits(running), strict=True):
            token, logprob = self._draw(logits, request)
            request.tokens.append(token)
            request.logprobs.append({token: Logprob(logprob, rank=int((logits > logits[token]).sum()) + 1)})
            self._finish(request)
            if request.reason is not None:
                del self.requests[request.request_id]
            if request.reason is not None or request.params.output_kind != RequestOutputKind.FINAL_ONLY:
                outputs.append(request.output())
        return outputs

    @torch.no_grad()
    def _next_logits(self, running: list[Request]) -> Tensor:
        """Returns the logits [B,V] after the tokens of each request, computed in one left-padded forward."""
        rows = [request.prompt + request.tokens for request in running]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        (adapter,) = {request.adapter for request in running}
        model = self.model if adapter is None else self.adapted[adapter]
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        return out.logits[:, -1].float()

    def _draw(self, logits: Tensor, request: Request) -> tuple[int, float]:
        """Draws a token from logits [V] and returns it with its log-prob, as ``logprobs_mode`` defines it."""
        params = request.params
        raw = logits.log_softmax(-1)
        logits = logits.clone()
        if len(request.tokens) < params.min_tokens:
            logits[list(params.stop_token_ids or ())] = -torch.inf
        greedy = params.temperature < 1e-5
        if not greedy:
            logits = keep_top(logits / params.temperature, params.top_k, params.top_p)
        processed = logits.log_softmax(-1)
        if greedy:
            token = int(logits.argmax())
        else:
            noise = torch.empty_like(processed).exponential_(generator=request.generator)
            token = int((processed.exp() / noise).argmax())
        logprobs = processed if self.logprobs_mode == "processed_logprobs" else raw
        return token, float(logprobs[token])

    def _finish(self, request: Request) -> None:
        params, token = request.params, request.tokens[-1]
        if len(request.tokens) >= params.min_tokens and token in (params.stop_token_ids or ()):
            request.reason, request.stop_reason = "stop", token
        elif len(request.tokens) == params.max_tokens:
            request.reason = "length"
        elif len(request.prompt) + len(request.tokens) >= self.max_model_len:
            request.reason = "length"


def keep_top(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Sets the logits [V] outside the ``top_k`` tokens and the nucleus ``top_p`` to -inf."""
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, len(logits))).values[-1], -torch.inf)
    if top_p < 1:
        ascending, order = logits.sort()
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[-1] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), -torch.inf)
    return logits


class LLM:
    """An engine in this process. Its weights are random until ``reload_weights`` is called."""

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        enforce_eager: bool = False,
        disable_custom_all_reduce: bool = False,
        hf_overrides: dict[str, Any] | None = None,
        kv_cache_memory_bytes: int | None = None,
        compilation_config: int | dict[str, Any] | None = None,
        logits_processors: list[str | type] | None = None,
        **kwargs: Any,
    ) -> None:
        for name in kwargs:
            if name not in ENGINE_ARGUMENTS:
                raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument '{name}'")
        # vLLM in the caller's process seeds all generators of the process
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        self.arguments = {
            "model": model,
            "dtype": dtype,
            "tensor_parallel_size": tensor_parallel_size,
        } | kwargs
        self.arguments |= {"kv_cache_memory_bytes": kv_cache_memory_bytes, "seed": seed}
        config = AutoConfig.from_pretrained(model)
        config.tie_word_embeddings = False
        lm = AutoModelForCausalLM.from_config(config, dtype=DTYPES.get(dtype, torch.float32)).eval()
        self.llm_engine = LLMEngine(
            lm.requires_grad_(False),
            max_model_len=kwargs.get("max_model_len") or config.max_position_embeddings,
            max_num_seqs=kwargs.get("max_num_seqs") or 256,
            logprobs_mode=kwargs.get("logprobs_mode", "raw_logprobs"),
            max_lora_rank=kwargs["max_lora_rank"] if kwargs.get("enable_lora") else None,
        )
        self.syncs: list[list[str]] = []  # names that each reload_weights received

    def generate(
        self,
        prompts: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        params = sampling_params or SamplingParams()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        names = [str(number) for number in range(len(prompts))]
        for name, prompt, own in zip(names, prompts, params, strict=True):
            self.llm_engine.add_request(name, prompt, own)
        finished: dict[str, RequestOutput] = {}
        while self.llm_engine.has_unfinished_requests():
            finished |= {out.request_id: out for out in self.llm_engine.step() if out.finished}
        return [finished[name] for name in names]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if callable(method):
            return [method(SimpleNamespace(get_model=lambda: self.llm_engine), *args)]
        if method != "reload_weights":
            raise NotImplementedError(f"Method {method!r} is not implemented.")
        self._reload(*args, **kwargs or {})
        return [None]

    @torch.no_grad()
    def _reload(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Copies weights by their names in the checkpoint; weights that are not given stay as they are."""
        targets = dict(self.llm_engine.model.named_parameters())
        names = []
        for name, tensor in weights_iterator:
            if name not in targets:
                raise ValueError(f"There is no module or parameter named {name!r}")
            if tensor.shape != targets[name].shape:
                raise AssertionError(
                    f"{name}: {tuple(tensor.shape)} does not fit {tuple(targets[name].shape)}"
                )
            targets[name].copy_(tensor)
            names.append(name)
        self.llm_engine.adapted.clear()
        self.syncs.append(names)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return True

    def sleep(self, level: int = 1, mode: str = "abort"):
        self.llm_engine.asleep = True
        if level == 2:
            with torch.no_grad():
                for parameter in self.llm_engine.model.parameters():
                    parameter.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.llm_engine.asleep = False
        return True
