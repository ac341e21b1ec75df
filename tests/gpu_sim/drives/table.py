"""Decodes 512 tokens for each of eight responses, for the table of docs/performance.md."""

from __future__ import annotations

from functools import partial

from tests.gpu_sim.drives.decoding import decode

whole = partial(decode, rows=8, slots=8, limit=512)
CASES = {
    "512 tokens": whole,
    "512 tokens and a stop string": partial(whole, stop_strings=("7 7 7",)),
    "512 tokens in two waves": partial(whole, slots=4),
}
