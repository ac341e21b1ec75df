"""A reward that returns the rewards of an environment (rollout.environment)."""

from __future__ import annotations

import torch

from ppo_ds.errors import UserError
from ppo_ds.types import Rollout, Row, Scores


class EnvironmentReward:
    """Scores each turn of the policy with the reward that the environment returned.

    The reward of a turn is the token score of its last token. The class can be part of a weighted reward.
    """

    def __init__(self, *, key: str = "reward"):
        self._key = key

    def __call__(self, rollout: Rollout) -> Scores:
        if rollout.turn_rewards is None:
            raise UserError(
                f"{self._key}=environment: there is no environment; set rollout.environment.path, or choose "
                "another reward"
            )
        return Scores(torch.zeros(len(rollout)), rollout.turn_rewards, {})

    def check_row(self, row: Row) -> None:
        """Accepts every row, since the reward does not read rows."""
