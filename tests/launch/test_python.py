"""Tests of train(), evaluate() and register(), which do the work of the commands in the caller's process."""

import json
import re
import sys
from copy import deepcopy
from pathlib import Path

import numpy
import pandas
import pytest

import ppo_ds
from launch.cli import load_config
from launch.python import overrides, write_rows
from ppo_ds.algorithm.policy.keys import POLICY_LOSSES
from ppo_ds.config.schema import PPOConfig, resolved
from ppo_ds.errors import UserError
from ppo_ds.tools.settings import config_of_settings
from tests.support.environment import ROOT, run_python

NOTEBOOK = ROOT / "docs" / "python.ipynb"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1e-6,
        "plain",
        "null",
        "1e-6",
        "a b,c",
        "it's",
        "C:\\x",
        [1, "x y"],
        {"a": [None, "b=c"]},
        "",
    ],
)
def test_settings_reach_the_config_as_they_are(value):
    arguments = ["+experiment=quickstart", *overrides({"rollout.environment.arguments": {"value": value}})]
    assert load_config(arguments, 1).rollout.environment.arguments == {"value": value}


def test_groups_and_paths_are_settings_too(tmp_path):
    given = {"algo": "rloo", "rollout.samples_per_prompt": 2, "run.dir": tmp_path / "it's a run"}
    config = load_config(["+experiment=quickstart", *overrides(given)], 1)
    assert (config.algo.advantage.estimator, config.run.dir) == ("rloo", str(tmp_path / "it's a run"))


def test_mistakes_are_value_errors():
    with pytest.raises(ValueError, match=r"run\.step=3: no such key; did you mean run\.steps\?"):
        ppo_ds.train("quickstart", {"run.step": 3})
    with pytest.raises(ValueError, match="no such experiment"):
        ppo_ds.train("quickstrat")
    with pytest.raises(UserError, match=r"register\('algo\.loss'\): must be one of algo\.policy\.loss"):
        ppo_ds.register("algo.loss")
    with pytest.raises(UserError, match="'<lambda>' is not a name"):
        ppo_ds.register("reward.path")(lambda prompts, responses, rows: [])


NO_TEXT = "must be a text or a dict of texts, numbers and lists"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"data": [{"prompt": "a"}, ...]}, rf"data, row 2: {NO_TEXT} \('ellipsis' object is not iterable\)"),
        ({"data": [{"prompt": "a", "x": 1j}]}, rf"data, row 1: {NO_TEXT} \(1j is a complex\)"),
        ({"data": 5}, "data: is a int; give a path, a list of rows, or one split of a data set"),
        ({"eval_data": {"prompt": ["a"]}}, "eval_data: is a dict; give a path, a list of rows, or one split"),
        ({"reward": 5}, "reward=5: cannot be called"),
        ({"on_step": lambda step: 1}, r"on_step=.*: cannot be called \(too many positional arguments\)"),
        ({"settings": ["run.steps=2"]}, r"settings=\['run.steps=2'\]: must be a dict"),
        ({"settings": {"data.path": "x"}, "data": "y"}, "data.path: is in settings and follows from another"),
    ],
)
def test_mistakes_in_arguments_are_told_in_one_line(arguments, line):
    with pytest.raises(UserError, match=f"^{line}"):
        ppo_ds.train("quickstart", **arguments)


def test_values_of_ppo_ds_cannot_be_replaced():
    with pytest.raises(UserError, match="ppo is a value of ppo_ds itself; choose another name"):
        ppo_ds.register("algo.policy.loss", "ppo")(lambda terms, policy: None)
    with pytest.raises(UserError, match="Other: is not derived from AdvantageConfig"):
        ppo_ds.register("algo.advantage.estimator", "Other")(type("Other", (), {}))


def test_numbers_of_numpy_and_dates_are_values_of_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    day = pandas.Timestamp("2020-01-02")
    row = {"prompt": "a", "number": numpy.float32(0.5), "list": numpy.arange(2), "day": day}
    found = json.loads(write_rows([row]).read_text())
    assert found == {"prompt": "a", "number": 0.5, "list": [0, 1], "day": "2020-01-02T00:00:00"}


def test_more_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE=2: train.. runs in one process"):
        ppo_ds.train("quickstart")


class Dataset:
    """The methods of datasets.Dataset that matter."""

    def to_list(self):
        return [{"prompt": "a"}, {"prompt": "b"}]

    def to_dict(self):
        return {"prompt": ["a", "b"]}


@pytest.mark.parametrize("data", [["a", "b"], Dataset(), pandas.DataFrame({"prompt": ["a", "b"]})])
def test_rows_of_any_kind_are_one_file(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_rows(data)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"prompt": "a"}, {"prompt": "b"}]
    assert path == write_rows(["a", "b"])


OWN = re.search(r"# my_losses.py\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)[1]


def test_a_config_names_code_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_losses.scaled", "my_losses.Scaled"):
        monkeypatch.delitem(POLICY_LOSSES, name, raising=False)
    try:
        given = ["+experiment=quickstart", "algo.policy.loss=my_losses.Scaled"]
        policy = load_config([*given, "algo.policy.factor=3"], 1).algo.policy
        assert (policy.loss, policy.function, policy.factor) == (
            "my_losses.Scaled", "my_losses.scaled", 3.0
        )  # fmt: skip
        assert load_config(
            ["+experiment=quickstart", "algo.policy.loss=my_losses.scaled"], 1
        ).algo.policy.function
        with pytest.raises(UserError, match=r"algo\.policy\.factr=3: no such key; did you mean .*factor"):
            load_config([*given, "algo.policy.factr=3"], 1)
        with pytest.raises(UserError, match=r"loss=my_losses\.none: cannot be imported, AttributeError"):
            load_config(["+experiment=quickstart", "algo.policy.loss=my_losses.none"], 1)
    finally:
        for name in ("my_losses.scaled", "my_losses.Scaled"):
            POLICY_LOSSES.pop(name, None)


LOSS = r"must be a function \(PolicyTerms, section\) -> TokenLoss: "


@pytest.mark.parametrize(
    ("key", "name", "problem"),
    [
        ("algo.policy.loss", "one", LOSS + "too many positional arguments"),
        ("algo.policy.loss", "number", LOSS + "3 is not a callable object"),
        ("algo.policy.loss", "Other", "is not derived from PolicyConfig"),
        ("algo.advantage.estimator", "one", r"must be a function \(Responses, CreditOptions\) -> Estimate"),
        ("rollout.backend", "one", "is not a class"),
    ],
)
def test_code_that_does_not_fit_is_refused(tmp_path, monkeypatch, key, name, problem):
    (tmp_path / "unfit_code.py").write_text("def one(terms): ...\nnumber = 3\nclass Other: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match=f"^{key}=unfit_code.{name}: {problem}"):
        load_config(["+experiment=quickstart", f"{key}=unfit_code.{name}"], 1)


def test_code_that_fails_when_it_is_imported_is_told_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "failing_code.py").write_text("import json\n\nloss = json.loads('')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(
        UserError, match=r"failing_code.loss: cannot be imported, JSONDecodeError: .*/failing_code.py:3\)"
    ):
        load_config(["+experiment=quickstart", "algo.policy.loss=failing_code.loss"], 1)


def test_code_of_a_run_of_someone_else_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text("open('imported', 'w')\ndef loss(terms, policy): ...")
    monkeypatch.chdir(tmp_path)
    settings = resolved(load_config(["+experiment=quickstart"], 1))
    settings["algo"]["policy"] = {"loss": "own_code.loss", "factor": 3}
    options = dict(trust_remote_code=False, kind=PPOConfig)
    assert config_of_settings(deepcopy(settings), Path("s"), **options).algo.policy.loss == "ppo"
    with pytest.raises(UserError, match="algo.policy.loss=own_code.loss: is code of that run"):
        config_of_settings(settings, Path("s"), with_template=False, **options)
    assert not (tmp_path / "imported").exists()


TWICE = """
import signal
from ppo_ds import train

before = signal.getsignal(signal.SIGINT)
steps = []
run = {"run.dir": "run", "run.steps": 2, "rollout.prompts_per_step": 128, "eval.max_prompts": 8}
first = train("quickstart", run, on_step=lambda step, metrics: steps.append((step, metrics["tokens"])))
again = train("quickstart", run)
assert [step for step, _ in steps] == [1, 2] == [*first.metrics.index]
assert [*first.metrics["tokens"]] == [tokens for _, tokens in steps] == [*again.metrics["tokens"]]
assert first.summary["exit_reason"] == again.summary["exit_reason"] == "done"
assert (first.model / "config.json").is_file() and "<iframe srcdoc=" in first.report()._repr_html_()
assert signal.getsignal(signal.SIGINT) is before

def refuse(step, metrics):
    raise KeyError("enough")

def fails(prompts, responses, rows):
    raise RuntimeError("no score today")

tiny = {"actor.model.path": first.model, "actor.model.dtype": "fp32", "data.max_prompt_tokens": 32,
        "sampling.max_new_tokens": 4, "rollout.prompts_per_step": 2, "run.steps": 1, "reward.trial": False}
stopped = run | {"run.dir": "refused"}
for settings, more in ((stopped, {"on_step": refuse}),
                       (tiny, {"reward": fails, "data": ["1+1=", "2+2="]})):
    try:
        train("grpo" if more.get("data") else "quickstart", settings, **more)
    except (KeyError, RuntimeError) as error:
        print(type(error).__name__, error, *getattr(error, "__notes__", ()))
assert [*train("quickstart", stopped).metrics.index] == [1, 2]
assert "step 1 of 2, from" in open("refused/events.jsonl").read()
"""


@pytest.mark.slow
def test_train_can_be_called_again_and_raises(tmp_path):
    done = run_python("-c", TWICE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "KeyError 'enough' in on_step; step 1 is saved, and the same call continues after it" in lines
    assert any(line.startswith("RunError ") and "no score today" in line for line in lines), lines


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text(code.replace("STEPS = 30", "STEPS = 2"))
    done = run_python("notebook.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run.step=3: no such key; did you mean run.steps?" in done.stdout
    assert (tmp_path / "outputs" / "evaluation" / "evaluation.html").is_file()
