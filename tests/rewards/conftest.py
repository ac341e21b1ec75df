import pytest

from ppo_ds.models.tokenizer import load_tokenizer
from tests.ops.by_name import on_ranks as on_thread_ranks
from tests.rewards.model_cases import Build
from tests.rewards.reward_cases import save_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    """Makes the actor's tokenizer."""
    return load_tokenizer(save_tokenizer(tmp_path / "actor-tokenizer"))


@pytest.fixture
def on_ranks():
    """Runs work(rank, reduce) on each of ``size`` ranks, which are threads; see tests/ops/by_name.py."""
    return on_thread_ranks


@pytest.fixture
def build(tokenizer):
    """Builds reward models for an actor with this tokenizer."""
    return Build(tokenizer)
