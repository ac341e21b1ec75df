"""A game of TextArena for one player as an environment, such as guessing a number.

TextArena draws from Python's module ``random``. Here each game draws from a generator of its own, seeded by
the column "seed" of its row, so that games change neither one another nor the random state of the run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from ppo_ds.config.text import did_you_mean, show
from ppo_ds.errors import UserError
from ppo_ds.types import Row

_state = random.getstate()
try:
    import textarena  # draws random numbers
except ImportError as error:
    raise ImportError(
        f"{error.name}, which games need, is not installed; run: pip install -c constraints.txt -e "
        "'.[textarena]'"
    ) from error
finally:
    random.setstate(_state)

EXAMPLE = "GuessTheNumber-v0"
_LOCK = Lock()  # held by the game that draws


class Generator(random.Random):
    """Stands in for the module ``random``."""

    Random = random.Random


class Game:
    """Plays one game. Its messages are the prompt and the feedback; its reward is that of the last turn.

    ``name`` is a name of TextArena without a wrapper, and ``options`` are arguments of the game.
    """

    def __init__(self, name: str = EXAMPLE, **options: Any):
        self.key, known = (
            f"rollout.environment.arguments.name={name}",
            textarena.envs.registration.ENV_REGISTRY,
        )
        if f"{name}-raw" not in known:
            meant = did_you_mean(name, (one.removesuffix("-raw") for one in known if one.endswith("-raw")))
            raise UserError(
                f"{self.key}: TextArena has no such game; choose another, such as {EXAMPLE}{meant}"
            )
        try:
            self.game = textarena.make(f"{name}-raw", **options)
        except LookupError as error:
            raise UserError(
                f"{self.key}: the game needs data of nltk; run: python -m nltk.downloader words "
                "averaged_perceptron_tagger_eng"
            ) from error

    def reset(self, row: Row) -> list[dict[str, str]]:
        seed = row.get("seed")
        if not isinstance(seed, int):
            raise UserError(
                f'column "seed": a game needs a whole number, not {show(seed)}; add the column to the rows'
            )
        self.random = Generator(seed)
        try:
            with self.drawing():
                self.game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise UserError(
                f"{self.key}: {error}; choose a game for one player, such as {EXAMPLE}"
            ) from error
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
