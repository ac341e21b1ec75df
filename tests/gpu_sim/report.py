"""Holds what the simulated GPU has recorded. Does not import torch, so that pytest can read reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """Findings of one case. Each Counter maps a description, with the place in the code, to its count.

    A blocking upload also makes the host wait, because the copy starts behind all queued work. It is not
    counted among ``waits``.
    """

    mixed: Counter[str] = field(default_factory=Counter)  # operations on tensors of two devices
    waits: Counter[str] = field(default_factory=Counter)  # waits of the host for the device
    blocking_uploads: Counter[str] = field(default_factory=Counter)  # pageable or synchronous copies
    pinned_uploads: Counter[str] = field(default_factory=Counter)  # asynchronous copies from pinned memory
    downloads: Counter[str] = field(default_factory=Counter)  # asynchronous copies to pinned memory
    in_capture: Counter[str] = field(default_factory=Counter)  # waits and uploads inside a graph capture
    operations: Counter[str] = field(default_factory=Counter)  # all operations on the device
    kernels: Counter[str] = field(default_factory=Counter)  # operations that launch at least one kernel
    facts: dict[str, Any] = field(default_factory=dict)  # numbers that a case adds
    error: str | None = None  # traceback of a case that failed

    def clear(self) -> None:
        """Clears all findings, so that the set-up of a case does not count."""
        for counter in (
            self.mixed,
            self.waits,
            self.blocking_uploads,
            self.pinned_uploads,
            self.downloads,
            self.in_capture,
            self.operations,
            self.kernels,
        ):
            counter.clear()

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Report:
        counters = {
            name: Counter(value)
            for name, value in content.items()
            if isinstance(value, dict) and name != "facts"
        }
        return cls(**content | counters)


def listed(counter: Counter[str]) -> str:
    """Formats a counter for the message of an assertion, one finding per line."""
    return "".join(f"\n  {count} x {what}" for what, count in counter.most_common())
