"""Tests the workspace of Weights & Biases: what it shows, and that it is saved on a server."""

import json
import os
import re
import subprocess
import sys

import pytest

from launch.dashboard import main
from ppo_ds.run.stage import HELD_OUT, TRAIN_PROMPTS
from ppo_ds.tools.dashboard import HISTOGRAMS, TABLES, build_sections, pattern_of
from ppo_ds.tracking.catalogue import METRICS, PANELS, SECTIONS, matches
from tests.support.environment import ROOT
from tests.tracking.wandb_server import wandb_server

pytest.importorskip("wandb_workspaces")
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def panels():
    """Returns the config of every panel of the workspace, by section name."""
    return {
        section.name: [
            panel._to_model().model_dump(by_alias=True, exclude_none=True) for panel in section.panels
        ]
        for section in build_sections()
    }


def test_there_is_a_section_for_each_prefix_in_the_order_of_the_report(panels):
    expected = [f"{one.title} ({one.prefix}/)" for one in SECTIONS if one.prefix]
    assert list(panels) == [*expected, "Progress", "Responses"]


def test_every_panel_of_the_catalogue_is_there(panels):
    shown = [panel["config"] for section in list(panels.values())[:-1] for panel in section]
    titles = [config["chartTitle"] for config in shown]
    for panel in PANELS:
        (title,) = {title for title in titles if re.sub(r" \(healthy: .*\)$", "", title) == panel.title}
        config = next(config for config in shown if config["chartTitle"] == title)
        assert config["xAxis"] == "step" and config["yAxisTitle"] == panel.unit
        names = [name for name in panel.metrics if "<" not in name]
        assert config["metrics"] == names
        for family in set(panel.metrics) - set(names):
            assert re.search(config["metricRegex"], family.replace("<", "").replace(">", ""))
    assert any("(healthy: " in title for title in titles)


def test_histograms_are_in_the_section_of_their_prefix(panels):
    shown = {config["metrics"][0] for config in configs(panels) if config["metrics"]}
    for prefix, histograms in HISTOGRAMS.items():
        assert all(name.startswith(f"{prefix}/") and name not in METRICS for name in histograms)
        assert set(histograms) <= shown


def test_every_metric_is_in_a_panel_of_its_own_or_of_the_catalogue(panels):
    shown = [name for config in configs(panels) for name in config["metrics"]]
    families = [config["metricRegex"] for config in configs(panels) if "metricRegex" in config]
    assert {name for name in METRICS if "<" not in name} - {"step"} <= set(shown)
    alone = {name for name in METRICS if not any(name in panel.metrics for panel in PANELS)}
    assert {"reward/score_std", "sft/nll", "episodes"} <= alone
    assert all(shown.count(name) == 1 for name in alone - {"step"} if "<" not in name)
    unlisted = [name for name in METRICS if "<" in name and pattern_of(name) not in families]
    assert all(any(matches(family, name) for name in shown) for family in unlisted)  # its members are listed


def configs(panels):
    return [panel["config"] for section in list(panels.values())[:-1] for panel in section]


def test_tables_of_responses(panels):
    texts = [json.dumps(panel) for panel in panels["Responses"]]
    assert [name in text for name, text in zip(TABLES, texts, strict=True)] == [True, True, True]
    assert {f"samples/{split}" for split in ("train", HELD_OUT, TRAIN_PROMPTS)} == set(TABLES)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("reward/component/<name>_mean", "reward/component/length_mean"),
        ("eval/accuracy/<subset>", "eval/accuracy/a"),
    ],
)
def test_a_family_is_found_by_its_pattern(family, name):
    assert re.search(pattern_of(family), name) and matches(family, name)
    assert not re.search(pattern_of(family), f"x{name}")


@pytest.mark.parametrize("argument", ["p", "me/", "/p", "me/p/x"])
def test_a_wrong_project_is_one_line(argument, capsys):
    assert main([argument]) == 2
    assert capsys.readouterr().err == f"error: {argument}: is not ENTITY/PROJECT, such as my-team/ppo_ds\n"


def test_without_the_extra_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["me/p"]) == 2
    assert capsys.readouterr().err == (
        "error: the package wandb-workspaces is not installed; run: pip install -c constraints.txt -e "
        "'.[dashboards]'\n"
    )


def dashboard(tmp_path, *arguments, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    kept |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "no-netrc"), "NO_PROXY": "*", **environment}
    command = [sys.executable, str(ROOT / "launch" / "dashboard.py"), *arguments]
    return subprocess.run(
        command, env=kept, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_workspace_is_saved_and_changed(tmp_path):
    with wandb_server() as server:
        login = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
        first = dashboard(tmp_path, "me/p", **login)
        assert first.returncode == 0, first.stderr
        ((name, view),) = server.views.items()
        address = first.stdout.strip()
        assert address.startswith(f"{server.url}/me/p?nw=") and address.partition("nw=")[2] in name
        spec = json.loads(view["spec"])
        sections = spec["section"]["panelBankConfig"]["sections"]
        assert [one["name"] for one in sections] == [section.name for section in build_sections()]
        assert spec["section"]["settings"]["xAxis"] == "step" and view["displayName"] == "ppo_ds"

        again = dashboard(tmp_path, "me/p", "--view", address, "--name", "renamed", **login)
        assert again.returncode == 0 and again.stdout.strip() == address, again.stderr
        assert list(server.views) == [name] and server.views[name]["displayName"] == "renamed"

        refused = dashboard(tmp_path, "me/q", **login)
        assert refused.returncode == 1 and refused.stdout == ""
        assert "error: wandb: " in refused.stderr and "project not found" in refused.stderr
        assert "Traceback" not in refused.stderr and KEY not in first.stderr + refused.stderr


@pytest.mark.slow
def test_without_a_key_there_is_no_traceback(tmp_path):
    done = dashboard(tmp_path, "me/p")
    assert done.returncode == 1 and done.stdout == ""
    assert "error: wandb: " in done.stderr and "Traceback" not in done.stderr
