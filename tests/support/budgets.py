"""Token budgets for tests."""

from __future__ import annotations

from typing import Any

from ppo_ds.run.token_budgets import TokenBudget, TokenBudgets


def fixed_budgets(world: Any, **numbers: int) -> TokenBudgets:
    """Returns budgets of 1000 tokens, or of ``numbers`` by name, that record nothing."""
    return TokenBudgets(
        **{
            name.removesuffix("_tokens"): TokenBudget(name, numbers.get(name, 1000))
            for name in ("rollout_tokens", "score_tokens", "train_tokens")
        },
        world=world,
        record=lambda budget: None,
        on_change=lambda numbers: None,
    )
