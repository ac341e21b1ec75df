"""Tests games of TextArena: an episode by hand, their random state, and errors with remedies."""

import random
import sys
from threading import Thread

import pytest

from ppo_ds.background.user_code import load_object
from ppo_ds.environments.calls import try_environment
from ppo_ds.errors import UserError
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.rollout.keys import EnvironmentConfig

PATH = "ppo_ds.examples.games:Game"
pytest.importorskip("textarena", reason="the extra textarena is not installed")


def play(seed, answers=(), **arguments):
    """Returns the number that the game drew, the prompt and the results of turns."""
    game = load_object(PATH, "k", "class")(**arguments)
    (prompt,) = game.reset({"prompt": "Play.", "seed": seed})
    return game.game.game_number, prompt["content"], [game.step(answer) for answer in answers]


def test_an_episode_by_hand():
    """Python draws 8 for seed 3, as ``random.Random(3).randint(1, 20)`` says."""
    number, prompt, results = play(3, ["[5]", "it is [10]", "[8]"])
    assert number == random.Random(3).randint(1, 20) == 8
    assert prompt.startswith("You are Player 0. You are playing Guess The Number.")
    assert results == [
        ("The target number is higher.", 0.0, False),
        ("The target number is lower.", 0.0, False),
        ("", 1.0, True),
    ]
    assert play(3, max_number=3)[0] == random.Random(3).randint(1, 3)


def test_games_change_neither_the_random_state_of_the_run_nor_one_another():
    expected = {seed: play(seed)[0] for seed in range(40)}
    random.seed(7)
    state, found = random.getstate(), {}
    threads = [Thread(target=lambda s=seed: found.update({s: play(s)[0]})) for seed in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected and len(set(found.values())) > 10
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("arguments", "row", "problem"),
    [
        ({}, {}, 'column "seed": a game needs a whole number, not null; add the column to the rows'),
        ({}, {"seed": "3"}, 'column "seed": a game needs a whole number, not 3; add the column to the rows'),
        (
            {"name": "GuesTheNumber-v0"},
            {"seed": 3},
            "rollout.environment.arguments.name=GuesTheNumber-v0: TextArena has no such game; choose a game "
            "for one player, such as GuessTheNumber-v0; did you mean GuessTheNumber-v0?",
        ),
        (
            {"name": "TicTacToe-v0"},
            {"seed": 3},
            "rollout.environment.arguments.name=TicTacToe-v0: The number of players has to be 2, received 1; "
            "choose a game for one player, such as GuessTheNumber-v0",
        ),
    ],
)
def test_mistakes_are_found_in_the_trial_call(arguments, row, problem):
    with pytest.raises(UserError) as caught:
        try_environment(
            EnvironmentConfig(path=PATH, arguments=arguments),
            {"prompt_text": "a"} | row,
            character_tokenizer("ab"),
            50,
        )
    assert str(caught.value) == problem


def test_without_the_extra_one_line_names_the_remedy(monkeypatch):
    for loaded in [one for one in sys.modules if one.startswith(("textarena", "ppo_ds.examples.games"))]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UserError) as caught:
        load_object(PATH, "rollout.environment.path", "class")
    (line,) = caught.value.problems
    assert line == (
        f"rollout.environment.path={PATH}: cannot import ppo_ds.examples.games: ImportError: the "
        "package textarena is not installed; run: pip install -c constraints.txt -e '.[textarena]'"
    )
