"""Runs the drives of the collected tests in one new process, since the stub must be loaded before torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_sim import stub
from tests.gpu_sim.cases import CASES
from tests.gpu_sim.report import Report, listed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Report]]:
    """Returns the reports by drive and case. Only the drives of this session's test files run.

    Without a compiler, skips the tests, or fails them in continuous integration.
    """
    if (reason := stub.missing()) is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    files = {item.path.stem for item in request.session.items if item.path.parent == Path(__file__).parent}
    drives = [drive for drive in CASES if f"test_{drive}" in files]
    output = tmp_path_factory.mktemp("gpu_sim") / "reports.json"
    command = [sys.executable, "-m", "tests.gpu_sim", *drives, "--json", str(output)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert output.exists(), f"the drives ended without a report:\n{process.stderr[-4000:]}"
    content: dict[str, dict[str, Any]] = json.loads(output.read_text())
    return {
        drive: {name: Report.from_json(report) for name, report in found.items()}
        for drive, found in content.items()
    }


@pytest.fixture
def report_of(reports: dict[str, dict[str, Report]]) -> Callable[[str, str], Report]:
    """Returns a function of a drive and a case that returns the report of a case without an error.

    An operation that mixes devices is an error too, except in the drive of deliberate mistakes.
    """

    def find(drive: str, case: str) -> Report:
        report = reports[drive][case]
        assert report.error is None, f"{case}:\n{report.error}"
        assert drive == "device" or not report.mixed, listed(report.mixed)
        return report

    return find
