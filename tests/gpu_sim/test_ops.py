"""Tests the functions of ppo_ds/ops in three dtypes. Functions with a result for the host wait once."""

import pytest

from tests.gpu_sim.cases import CASES
from tests.gpu_sim.report import listed

every = pytest.mark.parametrize("case", CASES["ops"])
# The number of groups, and the running mean, are numbers of the host. Both are computed on the CPU in a run.
WAITS = {"running": 1}
UPLOADS = {"sequences": 1}  # the ids of the stop tokens; in a run the responses are on the CPU


@every
def test_no_operation_mixes_devices(report_of, case):
    report = report_of("ops", case)
    assert not report.mixed, listed(report.mixed)
    assert report.operations


@every
def test_waits(report_of, case):
    report = report_of("ops", case)
    assert report.waits.total() == WAITS.get(case.split()[0], 0), listed(report.waits)


@every
def test_uploads(report_of, case):
    report = report_of("ops", case)
    assert report.blocking_uploads.total() == UPLOADS.get(case.split()[0], 0), listed(report.blocking_uploads)
