"""Tests supervised fine-tuning and reward-model training on the simulated GPU.

Waits and blocking uploads are the same for one micro-batch or forward and for two. A collective on numbers of
the host takes two waits and one upload.
"""

import pytest

from tests.gpu_sim.cases import CASES, TUNED
from tests.gpu_sim.report import listed

every = pytest.mark.parametrize("case", CASES["finetune"])
both = pytest.mark.parametrize("number", [1, 2])


@every
def test_no_operation_mixes_devices(report_of, case):
    report = report_of("finetune", case)
    assert not report.mixed, listed(report.mixed)


@both
@pytest.mark.parametrize("what", TUNED)
def test_a_step(report_of, what, number):
    report = report_of("finetune", f"{what} {number} micro-batches")
    assert report.facts["forwards"] == number
    # two collectives (stop requests, padding), the decision on the step, and its metrics
    assert report.waits.total() == 2 * 2 + 1 + 1, listed(report.waits)
    assert report.blocking_uploads.total() == 2, listed(report.blocking_uploads)


@both
def test_an_evaluation_of_rows(report_of, number):
    report = report_of("finetune", f"held-out rows {number} forwards")
    assert report.facts["forwards"] == number
    assert report.waits.total() == 2 + 1, listed(report.waits)  # stop requests; metrics
    assert report.blocking_uploads.total() == 1, listed(report.blocking_uploads)


@both
def test_an_evaluation_of_pairs(report_of, number):
    report = report_of("finetune", f"held-out pairs {number} forwards")
    assert report.facts["forwards"] == number
    assert report.waits.total() == 2 * 2 + 1, listed(report.waits)  # stop requests, sum over ranks; scores
    assert report.blocking_uploads.total() == 2, listed(report.blocking_uploads)
