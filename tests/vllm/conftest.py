"""Models for the real engine: vLLM on a CPU supports heads of 32, 64 and a few larger sizes only."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ppo_ds.examples.sums import prepare

SUMS = dict(max_operand=9, heldout=8, validation=10, target_accuracy=0.1, hidden_size=64, heads=2)


@pytest.fixture(scope="session")
def installed() -> None:
    """Skips the test if vLLM is not installed. It is not imported, which takes seconds."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed; make test-vllm installs it")


@pytest.fixture(scope="session")
def start(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with problems, a model that was warm-started on sums, and it with a tied head."""
    folder = tmp_path_factory.mktemp("start")
    prepare(str(folder), seed=0, **SUMS)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    for file in (folder / "model").iterdir():
        if "safetensors" not in file.name:
            (folder / "tied").mkdir(exist_ok=True)
            (folder / "tied" / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(folder / "tied")
    return folder
