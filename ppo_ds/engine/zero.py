"""Builds DeepSpeed's JSON config from the settings of a role. No process group is needed."""

from __future__ import annotations

from typing import Any

from deepspeed.utils import groups

# largest number of ranks whose gradients are summed in 16 bits; not measured on GPUs
RANKS_16_BIT_SUM = 64


def merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Merges ``override`` into a copy of ``base``, recursively for dicts; neither argument is changed."""
    out = dict(base)
    for key, value in override.items():
        nested = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if nested else value
    return out


def communication_dtype(dtype: str, ranks: int, raw: dict[str, Any]) -> str:
    """Returns the dtype in which gradients are summed over ``ranks``: fp32, bf16 or fp16.

    ``raw`` is the user's JSON config; its ``communication_data_type`` takes precedence.
    """
    own = raw.get("communication_data_type")
    if own is not None:
        return str(own).lower()
    return "fp32" if ranks > RANKS_16_BIT_SUM else dtype


def deepspeed_config(
    *,
    stage: int,
    dtype: str,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    grad_clip: float = 0.0,
    ranks: int = 1,
    raw: dict[str, Any],
) -> dict[str, Any]:
    """Returns the config of one engine.

    Batch sizes are fixed at 1. Micro-batches are formed by number of tokens, so their number differs from
    step to step, and TrainedModel marks the accumulation boundary of each optimizer step. Stage 0 in 16 bits
    runs as stage 1: the mathematics is the same, but DeepSpeed's stage 0 accumulates micro-batch gradients in
    16 bits, where small terms are lost (in bf16, 1 + 2^-9 = 1). ``raw`` is the user's JSON config
    (``actor.deepspeed``), which overrides everything else.
    """
    zero: dict[str, Any] = {"stage": 1 if stage == 0 and dtype != "fp32" else stage}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if offload_params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": grad_clip,
        "steps_per_print": None,
        # this timer waits for the device at every forward
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": zero,
        # use torch's AdamW even if its state is offloaded: DeepSpeed's own CPU optimizer needs a compiler
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 200}
    if dtype != "fp32":
        # the sum over many micro-batches needs more than 8 bits of mantissa
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        # In 16 bits, each reduction over ranks also runs in 16 bits by default, and each of its additions
        # rounds. Above RANKS_16_BIT_SUM ranks it runs in fp32, which doubles the bytes sent. With ZeRO 2 and
        # 3, the terms are still the 16-bit gradients of single micro-batches; with ZeRO-1, they are the fp32
        # sums over the micro-batches (DeepSpeed 0.19.8: ``allreduce_bucket`` in runtime/engine.py and
        # runtime/zero/stage_1_and_2.py, ``__avg_scatter_grads`` in runtime/zero/stage3.py).
        if communication_dtype(dtype, ranks, {}) != dtype:
            config["communication_data_type"] = "fp32"
    return merged(config, raw)


def new_node_groups() -> None:
    """Lets the next sharded model create new groups of zero_hpz_partition_size ranks.

    DeepSpeed 0.19.8 keeps these groups in a global variable. ``zero.Init`` creates them for each model with
    this setting, but raises an error for the second model (partition_parameters.py). A model that is already
    sharded holds a reference to its groups.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
