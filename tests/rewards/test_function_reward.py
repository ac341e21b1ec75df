import sys
from pathlib import Path

import pytest
import torch

from ppo_ds.errors import UserError
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.function import FunctionReward
from tests.rewards.reward_cases import make_rollout

ANSWERS = [("1+1=", "2"), ("2+2=", "5"), ("3+3=", "")]


@pytest.fixture
def scored_by(tmp_path, tokenizer):
    """Returns a function that scores ANSWERS with a reward function of the given body."""

    def run(body, header=""):
        file = tmp_path / "mine.py"
        file.write_text(f"{header}\ndef score(prompts, responses, rows):\n    {body}\n")
        rows = [{"answer": "2"}, {"answer": "4"}, {"answer": "6"}]
        return FunctionReward(f"{file}:score", tokenizer=tokenizer)(make_rollout(tokenizer, ANSWERS, rows))

    return run


def refusal(path, tokenizer):
    with pytest.raises(UserError) as caught:
        FunctionReward(path, tokenizer=tokenizer)
    assert str(caught.value).startswith(f"reward.path={path}: ") and "\n" not in str(caught.value)
    return str(caught.value)


def test_prompts_responses_and_rows_are_those_of_the_rollout(scored_by):
    checks = [
        "prompts == ['1+1=', '2+2=', '3+3=']",
        "responses == ['2', '5', '']",  # without the end token
        "[row['answer'] for row in rows] == ['2', '4', '6']",
    ]
    scores = scored_by(f"return [{', '.join(checks)}]")
    assert scores.total.tolist() == [1, 1, 1] and scores.total.dtype == torch.float32
    assert scores.components == {} and scores.per_token.shape == (3, 2) and not scores.per_token.any()


def test_only_tokens_under_the_mask_are_the_answer(tokenizer, tmp_path):
    """The reward function does not get ids of the padding."""
    (tmp_path / "mine.py").write_text(
        "def score(prompts, responses, rows): return [len(r) for r in responses]"
    )
    rollout = make_rollout(tokenizer, [("a", "long answer"), ("b", "x")])
    rollout.ids[~rollout.attention_mask] = 77
    assert FunctionReward(f"{tmp_path}/mine.py:score", tokenizer=tokenizer)(rollout).total.tolist() == [11, 1]


VALID = {
    "[1, 2, 3]": [1, 2, 3],
    "(1.0, 2.0, 3.0)": [1, 2, 3],
    "[0.5, -1, True]": [0.5, -1, 1],
    "np.array([1, 2, 3])": [1, 2, 3],
    "[np.float32(1), torch.tensor(2), 3]": [1, 2, 3],
    "torch.tensor([1., 2., 3.], requires_grad=True)": [1, 2, 3],
    "torch.ones(3).bfloat16()": [1, 1, 1],
    "torch.ones(3, dtype=torch.int8)": [1, 1, 1],
    "torch.ones(3) > 0": [1, 1, 1],
}


@pytest.mark.parametrize("returned", VALID)
def test_valid_return_values(scored_by, returned):
    scores = scored_by(f"return {returned}", "import numpy as np, torch").total
    assert scores.tolist() == VALID[returned]
    assert scores.dtype == torch.float32 and not scores.requires_grad


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("[1, 2]", "2 scores for 3 responses"),
        ("[1, 2, 3, 4]", "4 scores for 3 responses"),
        ("None", "'None' (NoneType); it must return a list of 3 floats"),
        ("1.0", "'1.0' (float); it must return a list"),
        ("np.float64(1)", "it must return a list of 3 floats"),
        ("{0: 1.0}", "(dict); it must return a list"),
        ("[1, None, 3]", "'None' (NoneType) for row 1, prompt '2+2='"),
        ("[1, 2, float('nan')]", "'nan' (float) for row 2, prompt '3+3='"),
        ("[-float('inf'), 2, 3]", "'-inf' (float) for row 0"),
        ("[1e300, 2, 3]", "'1e+300' (float) for row 0"),
        ("['1', 2, 3]", "'1' (str) for row 0"),
        ("np.zeros((3, 1))", "1 step rewards for a response of 0 steps (row 2, prompt '3+3=')"),
        ("[[1], [2, 3], []]", "2 step rewards for a response of 1 steps (row 1, prompt '2+2=')"),
        (
            "[[1], [None], []]",
            "'None' (NoneType) as the reward of step 1 for row 1, prompt '2+2='; the reward",
        ),
        ("[np.zeros(2), 2, 3]", "'2.0' (float) for row 1, prompt '2+2=', but a list for row 0"),
        ("[1, [2], 3]", "'[2.0]' (list) for row 1, prompt '2+2=', but a number for row 0"),
        ("[[[1]], [2], []]", "'[1]' (list) as the reward of step 1 for row 0"),
        ("[1, 2, 3 + 1j]", "'(3+1j)' (complex) for row 2"),
        ("'123'", "'123' (str); it must return a list of 3 floats"),
        ("(x for x in [1, 2, 3])", "(generator); it must return a list of 3 floats"),
    ],
)
def test_invalid_return_values(scored_by, tmp_path, returned, words):
    with pytest.raises(RewardError) as caught:
        scored_by(f"return {returned}", "import numpy as np")
    assert words in str(caught.value) and f"reward.path={tmp_path}/mine.py:score" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "kind"), [("raise KeyError('gold')", KeyError), ("import sys; sys.exit(0)", SystemExit)]
)
def test_exceptions_get_a_note_on_what_was_scored(scored_by, tmp_path, body, kind):
    with pytest.raises(kind) as caught:
        scored_by(body)
    assert caught.value.__notes__ == [
        f"in reward.path={tmp_path}/mine.py:score, scoring 3 responses; row 0 has the prompt '1+1='"
    ]


def test_the_function_may_modify_its_arguments(tmp_path, tokenizer):
    """Its rows are copies, because other parts and the next pass read the data set's rows again."""
    (tmp_path / "mine.py").write_text(
        "def score(prompts, responses, rows):\n"
        "    rows[0]['tests'].append('more'); rows[1]['prompt_text'] = 'x'; del rows[2]['tests']; n = "
        "len(rows)\n"
        "    prompts.clear(); responses.clear(); rows.clear(); return [1.0] * n"
    )
    rollout = make_rollout(tokenizer, ANSWERS, [{"tests": ["one"]} for _ in ANSWERS])
    reward = FunctionReward(f"{tmp_path}/mine.py:score", tokenizer=tokenizer)
    assert reward(rollout).total.tolist() == [1, 1, 1] == reward(rollout).total.tolist()
    assert [row["tests"] for row in rollout.metadata] == [["one"]] * 3 and [
        row["prompt_text"] for row in rollout.metadata
    ] == [p for p, _ in ANSWERS]


def test_two_files_of_one_name_are_two_modules(tmp_path, tokenizer):
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(
            f"VALUE = {value}\ndef score(p, r, rows):\n    import sys; return [sys.modules[__name__].VALUE] "
            "* len(p)"
        )
    rewards = [FunctionReward(f"{tmp_path}/{name}/mine.py:score", tokenizer=tokenizer) for name in "ab"]
    assert [reward(make_rollout(tokenizer, ANSWERS)).total[0].item() for reward in rewards] == [1, 2]


def test_a_module_of_the_current_directory(tmp_path, monkeypatch, tokenizer):
    (tmp_path / "my_rewards").mkdir()
    code = (
        "class Scorer:\n    def __call__(self, prompts, responses, rows): return [7.0] "
        "* len(rows)\nscorer = Scorer()"
    )
    (tmp_path / "my_rewards" / "sums.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    reward = FunctionReward("my_rewards.sums:scorer", tokenizer=tokenizer)
    assert reward(make_rollout(tokenizer, ANSWERS)).total.tolist() == [7, 7, 7]


def test_a_file_may_import_its_neighbours_and_hides_no_module(tmp_path, monkeypatch, tokenizer):
    (tmp_path / "neighbour.py").write_text("VALUE = 3")
    (tmp_path / "json.py").write_text(
        "from neighbour import VALUE\ndef score(p, r, rows): return [VALUE] * len(rows)"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert FunctionReward("json.py:score", tokenizer=tokenizer)(
        make_rollout(tokenizer, ANSWERS)
    ).total.tolist() == [3, 3, 3]
    import json

    assert Path(json.__file__).parent != tmp_path


def test_invalid_paths(tmp_path, tokenizer):
    file = tmp_path / "broken.py"
    file.write_text(
        "import math\nclass Kind: pass\nnumber = 3\ndef two(prompts, responses): return []\nasync def "
        "later(prompts, responses, rows): return []\n"
    )
    assert "pkg.mod:function" in refusal("no_colon", tokenizer)
    assert "pkg.mod:function" in refusal("mod:", tokenizer)
    assert "no such file" in refusal(f"{tmp_path}/none.py:fn", tokenizer)
    assert "ModuleNotFoundError" in refusal("no.such.module:fn", tokenizer)
    assert "has no score; its functions are: two, later" in refusal(f"{file}:score", tokenizer)
    assert "is not a function" in refusal(f"{file}:number", tokenizer)
    assert "is not a function" in refusal(f"{file}:Kind", tokenizer)
    assert "takes (prompts, responses)" in refusal(f"{file}:two", tokenizer)


def test_errors_while_importing_name_the_line(tmp_path, tokenizer):
    file = tmp_path / "bad.py"
    file.write_text("x = 1\ny = x / 0\n")
    assert f"ZeroDivisionError: division by zero ({file}:2)" in refusal(f"{file}:score", tokenizer)
    file.write_text("import no_such_package\n")
    assert f"No module named 'no_such_package' ({file}:1)" in refusal(f"{file}:score", tokenizer)
    file.write_text("def score(:\n")
    assert "SyntaxError" in refusal(f"{file}:score", tokenizer)
    # another size than before: Python takes a file of equal size and second for the one it has compiled
    file.write_text("import sys\n\nsys.exit(0)\n")  # must not end the run as if it were complete
    assert f"SystemExit: 0 ({file}:3)" in refusal(f"{file}:score", tokenizer)
