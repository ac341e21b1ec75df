"""Tests that the simulated device records mistakes that are made on purpose, and nothing else."""

import pytest

from tests.gpu_sim.cases import CAPTURED, CASES, MISTAKES

COUNTERS = ("mixed", "waits", "blocking_uploads", "pinned_uploads", "downloads", "in_capture")


@pytest.mark.parametrize("case", CASES["device"])
def test_what_is_recorded(report_of, case):
    report = report_of("device", case)
    found = {name: getattr(report, name).total() for name in COUNTERS if getattr(report, name)}
    expected = MISTAKES[case.removesuffix(CAPTURED)]
    if case.endswith(CAPTURED):
        assert found == {"in_capture": sum(expected.values())}
    else:
        assert found == expected
