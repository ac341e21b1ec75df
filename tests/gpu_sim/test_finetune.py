"""Tests supervised fine-tuning and reward-model training on the simulated GPU.

Waits and blocking uploads are the same for one micro-batch or forward and for two. A collective on numbers of
the host takes two waits and one upload.
"""

import pytest

from tests.gpu_sim.cases import TUNED
from tests.gpu_sim.report import listed

both = pytest.mark.parametrize("number", [1, 2])


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
