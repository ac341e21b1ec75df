"""Runs frozen models that are in CPU memory between uses. Only the last of three uses is counted.

The first use also moves the buffers, and its forward probes the head of the model, which waits for the
device.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_ds.engine.frozen import freeze
from ppo_ds.models.policy import Policy
from ppo_ds.models.value import ScoreModel
from tests.gpu_sim.cases import CASES as NAMES
from tests.gpu_sim.drives.parts import Case, config, experience
from tests.gpu_sim.fake_cuda import CUDA, FakeCuda


class Cudart:
    """Stands in for CUDA's page-locking, which the stub lacks."""

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert size and flags == 1
        self.locked.add(address)
        return 0


def offloaded(device: FakeCuda, family: str, kind: str) -> None:
    """Uses an offloaded model three times, as ppo/experience.py and rewards/frozen_model.py do."""
    settings, rows = config(family), experience()
    settings.tie_word_embeddings = kind == "reference"
    if kind == "reference":
        model = Policy(AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16), 0.7)
    else:
        settings.num_labels = 1
        model = ScoreModel(AutoModelForSequenceClassification.from_config(settings, dtype=torch.bfloat16))
    cudart, is_pinned = Cudart(), Tensor.is_pinned

    def is_locked(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in cudart.locked or is_pinned(tensor)

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "cudart", lambda: cudart),
    ):
        frozen = freeze(model, world=SimpleNamespace(device=CUDA), offload=True, deepspeed_config=None)
    with mock.patch.object(Tensor, "is_pinned", is_locked):
        host = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        for _ in range(3):
            device.report.clear()
            with frozen.resident():
                device.report.facts["uploads"] = device.report.pinned_uploads.total()
                assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
                if kind == "reference":
                    frozen(rows.ids, rows.attention_mask, rows.response_width)
                else:
                    frozen(rows.ids, rows.attention_mask)
            assert {name: p.data_ptr() for name, p in model.named_parameters()} == host
    device.report.facts["weights"] = len(list(model.named_parameters(remove_duplicate=False)))


def case(name: str) -> Case:
    family, _, kind = name.partition(" ")
    return partial(offloaded, family=family, kind=kind)


CASES = {name: case(name) for name in NAMES["offload"]}
