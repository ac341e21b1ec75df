"""A single-player game of TextArena as an environment, such as guessing a number.

TextArena draws from Python's module ``random``. Here each game has a separate generator, seeded by the column
"seed" of its row, so that games change neither one another nor the random state of the run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from ppo_ds.config.text import did_you_mean, show
from ppo_ds.errors import UserError, not_installed, single_line
from ppo_ds.types import Row

try:
    import textarena
except ImportError as error:
    raise ImportError(not_installed(str(error.name), "textarena")) from error

EXAMPLE = "GuessTheNumber-v0"
CHOOSE = f"choose a game for one player, such as {EXAMPLE}"
_LOCK = Lock()  # held by the game that is drawing


class Game:
    """Plays one game. Its messages are the prompt and the feedback; only the last turn has a reward.

    ``name`` is a game's name in TextArena without wrappers, and ``options`` are arguments of the game.
    """

    def __init__(self, name: str = EXAMPLE, **options: Any):
        self.key = f"rollout.environment.arguments.name={name}"
        self.name, self.options = f"{name}-raw", options
        names = textarena.envs.registration.ENV_REGISTRY
        if self.name not in names:
            meant = did_you_mean(name, (one.removesuffix("-raw") for one in names if one.endswith("-raw")))
            raise UserError(f"{self.key}: TextArena has no such game; {CHOOSE}{meant}")

    def reset(self, row: Row) -> list[dict[str, str]]:
        seed = row.get("seed")
        if not isinstance(seed, int):
            raise UserError(
                f'column "seed": a game needs a whole number, not {show(seed)}; add the column to the rows'
            )
        self.random = random.Random(seed)
        self.random.Random = random.Random  # type: ignore[attr-defined]  # some games construct generators
        try:
            self.game = textarena.make(self.name, **self.options)
            with self.drawing():
                self.game.reset(num_players=1, seed=seed)
        except (AssertionError, LookupError) as error:  # wrong number of players, or missing word lists
            raise UserError(f"{self.key}: {single_line(str(error))}; {CHOOSE}") from error
        return [{"role": "user", "content": self.messages()}]

    def step(self, answer: str) -> tuple[str, float, bool]:
        with self.drawing():
            done, _ = self.game.step(answer)
        if done:
            rewards, _ = self.game.close()
            return "", float(rewards[0]), True
        return self.messages(), 0.0, False

    def messages(self) -> str:
        """Returns the messages of the game since the last call, without the turns of the policy."""
        _, observed = self.game.get_observation()
        return "\n".join(text for _, text, kind in observed if kind.name != "PLAYER_ACTION")

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Makes TextArena draw from this game's generator inside the block."""
        with _LOCK:
            loaded = [module for name, module in [*sys.modules.items()] if name.startswith("textarena.")]
            drawing = [module for module in loaded if getattr(module, "random", None) is random]
            try:
                for module in drawing:
                    module.random = self.random  # type: ignore[attr-defined]
                yield
            finally:
                for module in drawing:
                    module.random = random  # type: ignore[attr-defined]
