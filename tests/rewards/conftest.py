import pytest
from reward_cases import save_tokenizer

from ppo_ds.models.tokenizer import load_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    """The actor's."""
    return load_tokenizer(save_tokenizer(tmp_path / "actor-tokenizer"))
