from tests.ppo.conftest import experience, on_ranks, tokenizer, world  # noqa: F401
