"""Tests policies, critics and frozen models on the simulated GPU, on one micro-batch each.

A micro-batch uploads its rows from pinned memory and never waits for the device.
"""

import pytest

from tests.gpu_sim.cases import CASES, PADDED_ONLY
from tests.gpu_sim.report import listed

every = pytest.mark.parametrize("case", CASES["models"])


@every
def test_the_host_never_waits_and_no_upload_blocks(report_of, case):
    report = report_of("models", case)
    assert report.operations.total() > 100 and report.pinned_uploads
    assert not report.waits, listed(report.waits)
    assert not report.blocking_uploads, listed(report.blocking_uploads)


@pytest.mark.parametrize(
    "case", [case for case in CASES["models"] if "packed" in case or "checkpointed" in case]
)
def test_packed_rows_use_the_kernel(report_of, case):
    report = report_of("models", case)
    family = case.split()[0]
    assert report.facts["packed"] is (family not in PADDED_ONLY)
    assert ("torch_attn._varlen_attn.default" in report.operations) is report.facts["packed"]
