from tests.ppo.conftest import on_ranks, world  # noqa: F401
