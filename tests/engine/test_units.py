"""Tests schedules, DeepSpeed's JSON, parameter groups and the environment of a single process."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from ppo_ds.distributed.world import single_process_environment
from ppo_ds.engine.trained import LRSchedule, parameter_counts, parameter_groups
from ppo_ds.engine.zero import deepspeed_config

# -- learning rate -------------------------------------------------------------------------------------


def rates(kind, total, warmup=0.0, low=0.0, lr=1.0):
    schedule = LRSchedule(lr, kind, warmup, low, total)
    return [schedule.at(step) for step in range(total)]


def test_warmup_reaches_the_full_rate_and_never_starts_at_zero():
    # 3 steps of warm-up: 1/4, 2/4, 3/4
    assert rates("constant", 10, warmup=0.3, lr=8.0) == pytest.approx([2, 4, 6, 8, 8, 8, 8, 8, 8, 8])
    assert rates("constant", 10, warmup=0.21, lr=8.0)[:4] == pytest.approx([2, 4, 6, 8])  # rounded up
    # 7 steps, although 0.07 * 100 > 7 in floating point
    assert rates("constant", 100, warmup=0.07, lr=8.0)[:8] == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize("total", [3, 24, 1000])
def test_a_warmup_in_steps_does_not_depend_on_the_length_of_the_run(total):
    schedule = LRSchedule(25.0, "cosine", 0.03, 0.1, total, warmup_steps=24)
    seen = [schedule.at(step) for step in range(min(total, 24))]
    assert seen == pytest.approx([1 + step for step in range(min(total, 24))])  # 25 x (step + 1) / 25
    assert LRSchedule(2.0, "linear", 0.5, 0.0, 10, warmup_steps=0).at(0) == 2.0


def test_cosine():
    # (1 + cos(pi k/4)) / 2
    assert rates("cosine", 5) == pytest.approx([1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)
    assert rates("cosine", 5, low=0.1) == pytest.approx([1, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)
    assert rates("cosine", 10, warmup=0.5, low=0.1)[5:] == pytest.approx(rates("cosine", 5, low=0.1))


@pytest.mark.parametrize("total", [1, 2, 7, 5000])
def test_cosine_annealing_is_torchs(total):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=8e-8)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total, eta_min=8e-9)
    theirs = []
    for _ in range(total):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates("cosine_annealing", total, low=0.1, lr=8e-8) == pytest.approx(theirs, rel=1e-9)
    assert total == 1 or rates("cosine", total, low=0.1, lr=8e-8) != pytest.approx(theirs, rel=1e-9)


def test_linear():
    assert rates("linear", 5, lr=2.0) == pytest.approx([2, 1.5, 1, 0.5, 0])
    assert rates("linear", 5, lr=2.0, low=0.2) == pytest.approx([2, 1.6, 1.2, 0.8, 0.4])


@pytest.mark.parametrize("kind", ["cosine", "cosine_annealing", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("total", [1, 2, 3, 100])
def test_the_first_rate_is_positive_and_all_rates_are_in_range(kind, warmup, total):
    seen = rates(kind, total, warmup, low=0.1, lr=5.0)
    assert seen[0] > 0 and all(
        0.1 * 5 <= rate <= 5 or step < warmup * total for step, rate in enumerate(seen)
    )
    peak = seen.index(max(seen))
    assert seen[: peak + 1] == sorted(seen[: peak + 1]) and seen[peak:] == sorted(seen[peak:], reverse=True)


def test_steps_beyond_the_last_keep_the_last_rate():
    assert LRSchedule(1.0, "cosine", 0.0, 0.1, 5).at(50) == pytest.approx(0.1)
    assert LRSchedule(1.0, "linear", 0.0, 0.1, 5).at(50) == pytest.approx(0.1)


# -- DeepSpeed's JSON ----------------------------------------------------------------------------------


def test_plain_config():
    config = deepspeed_config(stage=2, dtype="fp32", grad_clip=0.5, raw={})
    assert config["zero_optimization"] == {"stage": 2} and config["gradient_clipping"] == 0.5
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (1, 1)
    assert "bf16" not in config and "fp16" not in config and "data_types" not in config
    assert config["zero_force_ds_cpu_optimizer"] is False


def test_dtypes():
    bf16, fp16 = (deepspeed_config(stage=1, dtype=dtype, raw={}) for dtype in ("bf16", "fp16"))
    assert bf16["bf16"]["enabled"] and "fp16" not in bf16
    assert fp16["fp16"]["enabled"] and "bf16" not in fp16
    assert bf16["data_types"] == fp16["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_above_64_ranks_gradients_are_summed_in_fp32(dtype):
    for stage in range(4):
        few, many = (
            deepspeed_config(stage=stage, dtype=dtype, ranks=ranks, raw={"gradient_clipping": 2.0})
            for ranks in (64, 65)
        )
        assert "communication_data_type" not in few
        assert many == few | {"communication_data_type": "fp32"}
        own = {"communication_data_type": dtype}
        assert deepspeed_config(stage=stage, dtype=dtype, ranks=65, raw=own) == many | own | {
            "gradient_clipping": 0.0
        }


def test_offload():
    zero = deepspeed_config(stage=3, dtype="bf16", offload_optimizer=True, offload_params=True, raw={})[
        "zero_optimization"
    ]
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
    only_one = deepspeed_config(stage=3, dtype="bf16", offload_params=True, raw={})["zero_optimization"]
    assert "offload_param" in only_one and "offload_optimizer" not in only_one


def test_raw_json_overrides_everything():
    raw = {
        "zero_optimization": {"overlap_comm": True, "stage": 1},
        "gradient_clipping": 2.0,
        "wall_clock_breakdown": True,
        "bf16": {"x": 1},
    }
    before = copy.deepcopy(raw)
    config = deepspeed_config(stage=2, dtype="bf16", offload_optimizer=True, grad_clip=1.0, raw=raw)
    assert config["zero_optimization"] == {
        "stage": 1,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert (config["gradient_clipping"], config["wall_clock_breakdown"], config["bf16"]) == (
        2.0,
        True,
        {"enabled": True, "x": 1},
    )
    assert raw == before


# -- parameter groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2),
        LlamaConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            attention_bias=True,
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_norms_and_biases_do_not_decay(config):
    model = AutoModelForCausalLM.from_config(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    plain = {names[id(p)] for p in kept["params"]}
    assert (
        plain == {name for name in names.values() if name.endswith("bias") or "norm" in name or "ln_" in name}
        and plain
    )
    assert {names[id(p)] for p in decayed["params"]} == set(names.values()) - plain


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    (only,) = parameter_groups(model, 0.1)
    assert [id(p) for p in only["params"]] == [id(model[1].weight)]


def test_the_shape_of_a_sharded_parameter_is_its_whole_one():
    matrix, vector = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0))
    matrix.ds_shape, vector.ds_shape = torch.Size([4, 4]), torch.Size([4])
    model = nn.Module()
    model.matrix, model.vector = matrix, vector
    decayed, kept = parameter_groups(model, 0.1)
    assert decayed["params"][0] is matrix and kept["params"][0] is vector


def test_parameters_with_their_own_rate_form_their_own_groups():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    first, second = model
    groups = parameter_groups(model, 0.1, {first.weight: 0.5, first.bias: 0.5, second.weight: 1.0})
    found = [
        (group["lr_factor"], group["weight_decay"], [id(p) for p in group["params"]]) for group in groups
    ]
    assert sorted(found) == sorted(
        [
            (0.5, 0.1, [id(first.weight)]),
            (0.5, 0.0, [id(first.bias)]),
            (1.0, 0.1, [id(second.weight)]),
            (1.0, 0.0, [id(second.bias)]),
        ]
    )
    first.requires_grad_(False)
    assert parameter_counts(model) == (3 * 2 + 2, 2 * 3 + 3 + 3 * 2 + 2)


# -- environment ---------------------------------------------------------------------------------------


def test_no_variables_are_added_under_a_launcher():
    assert single_process_environment({"RANK": "3", "WORLD_SIZE": "8"}) == {}


def test_plain_python_is_a_single_rank():
    alone = single_process_environment({"HOME": "/root"})
    assert {key: alone[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    assert alone["MASTER_ADDR"] == "127.0.0.1"
