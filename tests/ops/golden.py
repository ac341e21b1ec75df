"""Turns golden files into test tables.

A test module has two tables for each file. The first maps output keys (glob patterns allowed) to functions of
a case that compute the same output with ``ppo_ds.ops``; the second lists outputs that are not compared, with
the reason. Every other output of every case becomes one test. An output that is in neither table fails, and
so does a pattern that matches no output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
from tests.goldens.golden_io import load

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@dataclass(frozen=True)
class Case:
    id: str
    inputs: dict[str, Any]
    params: dict[str, Any]
    outputs: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        """Returns an input by its name: case.mask is case.inputs["mask"]."""
        try:
            return self.inputs[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Within:
    """Marks a result that is compared only where mask = 1, and must be 0 elsewhere.

    The peer has arbitrary values outside the mask.
    """

    actual: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Close:
    """Marks a result that needs a wider tolerance than its dtype's, because of the peer's rounding."""

    actual: Any
    tolerance: float
    because: str


def cases(file: str) -> list[Case]:
    g = load(GOLDENS / file, to="torch")
    found = {c["id"]: c for c in g.get("cases", [g | {"id": "only"}])}
    for c in found.values():
        inputs = c["inputs"]
        c["inputs"] = found[inputs["same_as"]]["inputs"] if "same_as" in inputs else inputs
    return [Case(c["id"], c["inputs"], c.get("params", {}), _flat(c["outputs"])) for c in found.values()]


def _flat(outputs: dict[str, Any]) -> dict[str, Any]:
    """Splits each output that is a dict into one output per key, named "name.key"."""
    flat: dict[str, Any] = {}
    for name, x in outputs.items():
        flat |= {f"{name}.{k}": v for k, v in x.items()} if isinstance(x, dict) else {name: x}
    return flat


def outputs(file: str, not_compared: dict[str, str] | None = None) -> list[Any]:
    """Returns pytest parameters (case, key), one for each output of the file that is compared."""
    left_out = not_compared or {}
    return [
        pytest.param(case, key, id=f"{case.id}-{key}")
        for case in cases(file)
        for key in case.outputs
        if not look_up(left_out, case, key)
    ]


def look_up(table: dict[str, Any], case: Case, key: str) -> Any:
    """Returns the entry for "key" or "case/key"; exact entries take precedence over patterns."""
    names = (f"{case.id}/{key}", key)
    exact = (table[n] for n in names if n in table)
    return next(exact, None) or next(
        (entry for p, entry in table.items() if any(fnmatchcase(n, p) for n in names)), None
    )


def check(case: Case, key: str, targets: dict[str, Callable[[Case], Any]]) -> None:
    target = look_up(targets, case, key)
    assert target, f"{case.id}/{key} is in neither table"
    same(target(case), case.outputs[key])


def same(actual: Any, expected: Any) -> None:
    wider = 0.0
    if isinstance(actual, Close):
        actual, wider = actual.actual, actual.tolerance
    if isinstance(actual, Within):
        outside = ~actual.mask.bool()
        assert torch.equal(actual.actual[outside], torch.zeros_like(actual.actual[outside])), (
            "not 0 outside the mask"
        )
        actual, expected = actual.actual[~outside], expected[~outside]
    expected = torch.as_tensor(expected, dtype=None if isinstance(expected, Tensor) else torch.float64)
    actual = torch.as_tensor(actual, dtype=None if isinstance(actual, Tensor) else expected.dtype)
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual.to(expected.dtype), expected)
        return
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    coarser = torch.float32 if torch.float32 in (actual.dtype, expected.dtype) else torch.float64
    tolerance = max(wider, TOLERANCE[coarser])
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def assert_no_stale_entries(file: str, *tables: dict[str, Any]) -> None:
    """Checks that every entry names at least one output."""
    names = {n for c in cases(file) for key in c.outputs for n in (key, f"{c.id}/{key}")}
    stale = [p for table in tables for p in table if not any(fnmatchcase(n, p) for n in names)]
    assert not stale, f"{file}: nothing matches {stale}"


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x, retain_graph=True)[0]
