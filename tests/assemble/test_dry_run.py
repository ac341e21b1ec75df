"""Tests parts of the config of a dry run; tests/integration/test_dry_run.py runs it."""

from ppo_ds.assemble.dry_run import _moved


def test_paths_in_the_run_directory_are_moved_to_the_folder_of_the_dry_run() -> None:
    tree = {"dir": "runs/a", "lists": [["runs/a/x.jsonl", "runs/ab", 3], "b/runs/a"], "run": {"name": None}}
    assert _moved(tree, "runs/a", "dry") == {
        "dir": "dry",
        "lists": [["dry/x.jsonl", "runs/ab", 3], "b/runs/a"],
        "run": {"name": None},
    }
