"""Runs the policy, the critic and the frozen models of each family on one micro-batch, with gradients.

The first forward of a policy is not counted: it determines how the model uses its head, which waits for the
device.
"""

from __future__ import annotations

from functools import partial

import torch

from ppo_ds.algorithm.loss.aggregation import batch_totals
from ppo_ds.models.packed_attention import why_padded
from ppo_ds.models.policy import Policy
from ppo_ds.models.value import ScoreModel
from ppo_ds.ppo.losses import actor_loss
from tests.gpu_sim.cases import CASES as NAMES
from tests.gpu_sim.drives.learner import policy_terms, value_objective
from tests.gpu_sim.drives.parts import Case, classifier, experience, language_model
from tests.gpu_sim.fake_cuda import CUDA, FakeCuda


def probe_head(device: FakeCuda, model: Policy) -> None:
    """Runs the first forward of a policy and clears its records."""
    rows = experience()
    with torch.no_grad():
        model(rows.ids, rows.attention_mask, rows.response_width)
    device.report.clear()


def policy(device: FakeCuda, family: str, variant: str) -> None:
    """Computes the policy loss of one micro-batch and its gradients."""
    lm = language_model(family, adapters=variant == "checkpointed with adapters")
    model, rows = Policy(lm, 0.7), experience()
    model.packed = why_padded(lm, "auto", CUDA) is None
    if variant == "padded":
        model.packed = False
    assert variant != "packed" or model.packed
    totals = batch_totals([rows.response_mask], dp_size=1)
    probe_head(device, model)
    out = model(rows.ids, rows.attention_mask, rows.response_width, with_entropy=True)
    loss, _ = actor_loss(policy_terms(), out, rows.to(CUDA), totals, kl_coef=0.1)
    loss.backward()
    trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.is_cuda for parameter in trained)
    device.report.facts["packed"] = model.packed


def critic(device: FakeCuda, family: str) -> None:
    """Computes the value loss of one micro-batch and its gradients, with rows packed if the family can."""
    model, rows = ScoreModel(classifier(family)), experience()
    model.packed = why_padded(model.trunk, "auto", CUDA) is None
    totals = batch_totals([rows.value_mask], dp_size=1)
    device.report.clear()
    values = model(rows.ids, rows.attention_mask, rows.response_width)
    value_objective()(values, rows.to(CUDA), totals)[0].backward()


def frozen(device: FakeCuda, family: str) -> None:
    """Computes log-probs as the reference does."""
    model, rows = Policy(language_model(family), 0.7).eval(), experience()
    model.packed = why_padded(model.lm, "auto", CUDA) is None
    probe_head(device, model)
    with torch.no_grad():
        out = model(rows.ids, rows.attention_mask, rows.response_width)
    assert out.logprobs.is_cuda and out.logprobs.dtype == torch.float32


def case(name: str) -> Case:
    family, _, variant = name.partition(" ")
    if variant == "critic":
        return partial(critic, family=family)
    return (
        partial(frozen, family=family)
        if variant == "frozen"
        else partial(policy, family=family, variant=variant)
    )


CASES = {name: case(name) for name in NAMES["models"]}
