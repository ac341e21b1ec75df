"""Tests the import of a user's environment and the trial call before models are loaded."""

import pytest

from ppo_ds.environments.base import load_environment
from ppo_ds.environments.calls import try_environment
from ppo_ds.errors import UserError
from ppo_ds.rollout.keys import EnvironmentConfig
from tests.config.commands import MINIMAL, complaints, problems

GOOD = """
class Mine:
    def __init__(self, size=3): self.size = size
    def reset(self, row): return None
    def step(self, answer): return "again", 0.0, False
"""


@pytest.fixture
def loaded(tmp_path):
    """Writes a module with a class Mine and loads the class."""

    def load(code=GOOD, name="Mine", **arguments):
        (tmp_path / "mine.py").write_text(code)
        return load_environment(f"{tmp_path}/mine.py:{name}", arguments)

    return load


def refused(call):
    with pytest.raises(UserError) as caught:
        call()
    (line,) = caught.value.problems
    return line


def test_each_response_gets_its_own_object_with_the_arguments(loaded):
    make = loaded(size=5)
    assert make().size == 5 and make() is not make()


@pytest.mark.parametrize(
    ("code", "name", "problem"),
    [
        (GOOD, "Other", "mine.py has no Other; its classes are: Mine"),
        ("def Mine(): pass", "Mine", "(function) is not a class; give one with reset and step"),
        (GOOD.replace("reset", "start"), "Mine", "the class has no method reset(row); add it"),
        (GOOD.replace("(self, answer)", "(self)"), "Mine", "step is called with (answer), but takes (self)"),
    ],
)
def test_a_class_without_the_interface_is_refused(loaded, code, name, problem):
    line = refused(lambda: loaded(code, name))
    assert line.startswith("rollout.environment.path=") and problem in line


def test_wrong_arguments_are_refused(loaded):
    line = refused(lambda: loaded(sizes=5))
    assert line.startswith("rollout.environment.arguments: got an unexpected keyword argument 'sizes'; ")


# -- the trial call ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ("1 / 0", "raised ZeroDivisionError: division by zero at FILE:"),
        ("(_ for _ in ()).throw(ValueError('a\\n  b'))", "raised ValueError: a b at FILE:"),
        ("None", "returned 'None' (NoneType), which is not (feedback, reward, done)"),
        ("__import__('threading').Event().wait()", "gave no result within 0.5 s"),
    ],
)
def test_the_trial_call_finds_errors(tmp_path, tokenizer, step, problem):
    code = GOOD.replace('return "again", 0.0, False', f"return {step}")
    (tmp_path / f"mine{len(step)}.py").write_text(code)
    path = f"{tmp_path}/mine{len(step)}.py:Mine"
    line = refused(
        lambda: try_environment(
            EnvironmentConfig(path=path, timeout_seconds=0.5), {"prompt_text": "1="}, tokenizer, 50
        )
    )
    file = path.removesuffix(":Mine")
    assert line.startswith(f"rollout.environment.path={path}: {problem.replace('FILE', file)}")
    assert line.endswith(
        ", in a call before the start with the answer 'This is a trial response.'; correct the class, or "
        "skip this call with rollout.environment.trial=false"
    )


def test_the_trial_call_accepts_an_environment(tmp_path, tokenizer):
    noting = f"open({str(tmp_path / 'answers')!r}, 'a').write(answer); return"
    (tmp_path / "fine.py").write_text(GOOD.replace('return "again', noting + ' "again'))
    try_environment(EnvironmentConfig(path=f"{tmp_path}/fine.py:Mine"), {"prompt_text": "1="}, tokenizer, 50)
    assert (tmp_path / "answers").read_text() == "This is a trial response."


# -- the config --------------------------------------------------------------------------------------------


def test_the_reward_environment_needs_an_environment():
    settings = [line for line in MINIMAL if not line.startswith("reward")]
    (line,) = complaints(*settings, "reward=environment")
    assert line == (
        "reward=environment: there is no environment; set rollout.environment.path, or choose another reward"
    )
    assert problems(*settings, "reward=environment", "rollout.environment.path=a.b:C") == []


def test_shaping_of_whole_scores_is_refused_for_rewards_of_turns():
    settings = [line for line in MINIMAL if not line.startswith("reward")]
    settings += ["reward=environment", "rollout.environment.path=a.b:C"]
    assert complaints(*settings, "algo=rlhf") == [
        "algo.reward_shaping.normalize=running: does not apply to the rewards of turns, which are all scores "
        "of reward=environment; set it to none",
        "algo.reward_shaping.missing_eos=set: does not apply to the rewards of turns, which are all scores "
        "of reward=environment; set it to subtract or null",
    ]
    assert problems(*settings, "algo.reward_shaping.missing_eos=subtract") == []
    teacher = ("reward=teacher", "reward.model.path=org/a", "algo=rlhf")
    lines = complaints(*settings[:-2], *teacher)
    assert ["tokens, which are all scores of reward=teacher" in line for line in lines] == [True, True]
    mixture = ["reward=weighted", "reward@reward.parts.turns.reward=environment"]
    assert problems(*settings[:-2], *mixture, settings[-1], "algo=rlhf") == []
