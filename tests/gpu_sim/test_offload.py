"""Tests that offloaded frozen models are uploaded from page-locked memory and never copied back."""

import pytest

from tests.gpu_sim.cases import CASES
from tests.gpu_sim.report import listed

every = pytest.mark.parametrize("case", CASES["offload"])


@every
def test_each_weight_is_uploaded_from_locked_pages_for_each_use(report_of, case):
    report = report_of("offload", case)
    # Module.to makes new parameters of the simulated device, and so uploads tied weights twice
    assert report.facts["uploads"] == report.facts["weights"] > 5
    assert not report.blocking_uploads, listed(report.blocking_uploads)


@every
def test_nothing_is_copied_back(report_of, case):
    report = report_of("offload", case)
    assert not report.downloads and not report.waits, listed(report.downloads + report.waits)
