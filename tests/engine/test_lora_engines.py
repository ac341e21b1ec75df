"""Tests LoRA on every ZeRO stage: training, the reference without a copy, decoding, export and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.engine.lora_worker import LORA_LR, LR, ROWS, P, R, V
from tests.engine.test_checkpoint import launch
from tests.support.ranks import RankServer

Case = dict[str, Any]


def make_models(root: Path, width: int = 16) -> None:
    """Writes models with tied embeddings and weights so large that a small change has an effect."""
    sizes = dict(
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    config = LlamaConfig(
        vocab_size=V,
        **sizes,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "actor")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    make_models(root)
    return root


@pytest.fixture(scope="module")
def found(root: Path, rank_server: RankServer) -> dict[str, Case]:
    return {
        case["case"]: case
        for ranks in (1, 2)
        for case in launch(rank_server, ranks, root, "all", "lora_worker")
    }


FP32 = [
    "1 zero0 fp32",
    "1 zero3 fp32",
    *(f"2 zero{stage} fp32" for stage in range(4)),
    "2 zero3 fp32 checkpointing",
    "2 zero2 fp32 offload_optimizer",
    "2 zero3 fp32 offload_optimizer offload_params",
]
BF16 = ["2 zero2 bf16", "2 zero3 bf16"]


@pytest.mark.parametrize("label", FP32 + BF16)
def test_only_adapters_are_trained(found: dict[str, Case], label: str) -> None:
    case = found[label]
    assert case["base untouched"] and case["all adapters changed"] and case["B starts at 0, A does not"], case
    # adapters: 2 layers x rank 2 x (in + out): q 16+16, k and v 16+8, o 16+16, gate, up and down 16+24. All
    # parameters: also 19 x 16 embeddings, 2 x (two norms of 16 and the matrices), and the last norm.
    adapters = 2 * 2 * (32 + 2 * 24 + 32 + 3 * 40)
    assert case["counts"] == [adapters, adapters + 19 * 16 + 2 * (32 + 2 * 256 + 2 * 128 + 3 * 384) + 16]


@pytest.mark.parametrize("label", FP32 + BF16)
def test_the_reference_is_the_actors_base_and_the_adapters_are_enabled_again(
    found: dict[str, Case], label: str
) -> None:
    case, rounding = found[label], 0.1 if "bf16" in label else 1e-5
    assert case["shared"] and case["reference starts as the actor"] and case["reference stays"], case
    assert case["gap to the base"] < rounding < 0.3 < case["moved"], case
    assert case["adapters on again"], case


@pytest.mark.parametrize("label", FP32 + BF16)
def test_decoding_and_export_use_the_trained_weights(found: dict[str, Case], label: str) -> None:
    case, rounding = found[label], 0.2 if "bf16" in label else 1e-4
    assert case["decoded gap"] < rounding < case["moved"], case
    assert max(case["exported gaps"][name] for name in ("model", "adapter")) < rounding, case


class PlainLora(nn.Module):
    """Computes W + alpha / rank * B A with alpha / rank = 2."""

    def __init__(self, down: Tensor, up: Tensor):
        super().__init__()
        self.down, self.up = nn.Parameter(down.clone()), nn.Parameter(up.clone())

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 2.0 * self.up @ self.down


def plain_training(root: Path, first: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Trains the adapters in plain torch on all rows at once; returns 5 gradient norms and the adapters."""
    lm = AutoModelForCausalLM.from_pretrained(root / "actor").requires_grad_(False)
    adapters = {}
    for name in [
        name.removeprefix("lm.").removesuffix(".lora_A.default.weight")
        for name in first
        if ".lora_A." in name
    ]:
        down, up = (first[f"lm.{name}.lora_{matrix}.default.weight"] for matrix in "AB")
        adapters[name] = PlainLora(down, up)
        parametrize.register_parametrization(lm.get_submodule(name), "weight", adapters[name])
    parameters = [p for adapter in adapters.values() for p in adapter.parameters()]
    adamw, norms = (
        torch.optim.AdamW(parameters, lr=LORA_LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        [],
    )
    for step in range(5):
        ids = torch.randint(0, V, (ROWS, P + R), generator=torch.Generator().manual_seed(100 + step))
        loss = torch.zeros(())
        for row in range(ROWS):
            kept = ids[row, row % P : P + R - row % 4]
            n = R - row % 4
            table = lm(input_ids=kept[None]).logits[0].log_softmax(-1)
            loss = (
                loss
                - (table[-n - 1 : -1].gather(1, kept[-n:, None])[:, 0] * torch.sin(kept[-n:].float())).sum()
            )
        (loss / (ROWS * R)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 1.0)))
        adamw.step()
        adamw.zero_grad()
    last = {
        f"lm.{name}.lora_{matrix}.default.weight": p
        for name, a in adapters.items()
        for matrix, p in (("A", a.down), ("B", a.up))
    }
    return norms, last


@pytest.fixture(scope="module")
def plain(found: dict[str, Case], root: Path) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    first = {
        name.removeprefix("first/"): x
        for name, x in load_file(root / "1 zero0 fp32.safetensors").items()
        if name.startswith("first/")
    }
    return first, *plain_training(root, first)


@pytest.mark.parametrize("label", FP32)
def test_every_stage_and_number_of_ranks_trains_like_plain_torch(
    found: dict[str, Case], root: Path, plain: Any, label: str
) -> None:
    first, norms, last = plain
    tensors = load_file(root / f"{label}.safetensors")
    assert len(first) == len(last) == 28 and len(tensors) == 56
    assert found[label]["norms"] == pytest.approx(norms, rel=1e-4)
    for name in first:
        assert torch.equal(tensors[f"first/{name}"], first[name]), name
        torch.testing.assert_close(tensors[f"last/{name}"], last[name], rtol=0, atol=1e-4, msg=name)
        assert (last[name] - first[name]).abs().max() > 1e-2, name


@pytest.mark.parametrize("stage", [0, 3])
def test_the_head_of_a_critic_has_its_own_learning_rate(found: dict[str, Case], stage: int) -> None:
    """Adam's first step is the learning rate.

    B has no gradient while the head is 0, so its first gradient is in the second step, which moves it by

    m / sqrt(v) = (0.1 / (1 - 0.9^2)) / sqrt(0.05 / (1 - 0.95^2)) = 0.735 times the learning rate.
    """
    case = found[f"critic 2 zero{stage}"]
    assert case["lrs"] == [LORA_LR] * 5
    assert case["moves"][0] == {"score": pytest.approx(LR, rel=1e-3), "lora_B": 0}
    assert case["moves"][1]["lora_B"] == pytest.approx(0.735 * LORA_LR, rel=1e-3)
    assert case["moves"][4]["score"] < 5 * LR * 1.01


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exported_critic_equals_the_trained_one(found: dict[str, Case], stage: int) -> None:
    case = found[f"critic 2 zero{stage}"]
    assert case["gap"] < 1e-5 < 1e-3 < case["values"], case


@pytest.mark.parametrize(
    "label", ["1 zero0 fp32 actor", "2 zero2 bf16 actor", "2 zero3 bf16 actor", "2 zero3 fp32 critic"]
)
def test_a_resumed_run_continues_bit_by_bit(found: dict[str, Case], label: str) -> None:
    case = found[f"resumed {label}"]
    assert case["loaded"] and case["steps"] and case["weights"] and case["only what is trained"], case


def test_other_adapters_are_refused(found: dict[str, Case], root: Path) -> None:
    case, start = found["refused"], f"run.resume: {root / 'refused'} "
    assert case["same"] == case["written out"] == ""
    assert case["alpha"] == start + "was made with actor.lora.alpha=4, this run has 64: keep it"
    assert case["rank"] == start + "was made with actor.lora.rank=2, this run has 4: keep it"
    assert case["targets"].startswith(start.rstrip() + ": was saved from another model: "), case
    assert case["targets"].endswith("with its lora.rank and lora.targets"), case
