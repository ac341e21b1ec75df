"""Tests launch/report.py: one run, several runs, and command lines that are wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch import report
from tests.tracking.html.runs import make_ppo_run


def test_one_run_and_several(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = make_ppo_run(tmp_path / "first", summary=False)
    second = make_ppo_run(tmp_path / "second", name="other")
    assert report.main([str(first)]) == 0
    assert "<title>demo</title>" in (first / "report.html").read_text(encoding="utf-8")
    assert report.main([str(first), str(second)]) == 0
    assert "<title>2 runs</title>" in (tmp_path / "compared.html").read_text(encoding="utf-8")
    assert report.main([str(second), "--output", "page.html"]) == 0
    assert "<title>other</title>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out.split() == [str(first / "report.html"), "compared.html", "page.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: RUN"),
        (["nowhere"], "nowhere: no such run directory"),
        (["empty"], "empty: no run directory: it has no metrics.jsonl"),
        (["empty", "-o", "nowhere/page.html"], "--output=nowhere/page.html: no such directory nowhere"),
        (["empty", "-o", "empty"], "--output=empty: is a directory; name a file: empty/report.html"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert report.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_the_script_runs_from_any_directory(tmp_path):
    run = make_ppo_run(tmp_path / "run")
    script = Path(report.__file__).resolve()
    subprocess.run([sys.executable, script, run.name], cwd=tmp_path, check=True, timeout=300)
    assert (run / "report.html").exists()
