"""Tests that docs/dev/scaling.md and docs/fit_and_speed.md have the numbers of the doctor.

Experiments quote its seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import published
from launch.cli import CONF
from ppo_ds.tools.doctor.step_time import phase_lines
from tests.support.hub_models import hub_folders
from tests.tools.scaling_rows import phases_of, planned, rows

DOCS = Path(__file__).parents[2] / "docs"
SCALING = (DOCS / "dev" / "scaling.md").read_text()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return hub_folders(tmp_path_factory.mktemp("hub"))


def test_the_page_has_the_table_of_sizes(folders: dict[str, str]) -> None:
    missing = [line for line in rows(folders) if line not in SCALING]
    assert not missing, "python -m tests.tools.scaling_rows prints the table\n" + "\n".join(missing)


def test_the_short_table_has_the_numbers_of_the_long_one() -> None:
    def tables(page: str) -> list[list[str]]:
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]

    short = tables((DOCS / "fit_and_speed.md").read_text())
    found = {(row[1], row[2].split()[0]): row[3] for row in short if row[0].startswith(("0.5B", "7B", "72B"))}
    long = {(row[0], row[1]): row[3] for row in tables(SCALING) if row[0].startswith("`rlhf")}
    common = found.keys() & long.keys()
    assert len(common) == 5 and {key: found[key] for key in common} == {key: long[key] for key in common}


def test_the_page_has_the_published_times() -> None:
    lines = [*published.deepspeed_chat(), *published.openrlhf()]
    missing = [line for line in lines if line not in SCALING]
    assert not missing, "python benchmarks/published.py prints the tables\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("experiment", "gpus", "bound", "seconds", "longest"),
    [
        ("rlhf_70b_lora", 8, "compute", (0.02, 0.05), "update_actor"),
        ("rlhf_70b", 64, "links", (0.3, 0.7), "generate"),
    ],
)
def test_experiments_and_the_page_quote_the_doctor(
    folders: dict[str, str],
    experiment: str,
    gpus: int,
    bound: str,
    seconds: tuple[float, float],
    longest: str,
) -> None:
    phases, _ = phases_of(*planned(experiment, gpus, (), folders), gpus)
    assert "\n".join(phase_lines(phases)) in SCALING
    found = phases["generate"]
    token = float(found.detail.partition(" decode steps of ")[2].partition(" ms")[0]) / 1000
    comment = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    assert f"{token:.2f} s" in comment and found.bound == bound and seconds[0] < token < seconds[1]
    assert max(phases, key=lambda phase: phases[phase].seconds) == longest
