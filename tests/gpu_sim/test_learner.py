"""Tests the PPO update and the computation of experience on the simulated GPU.

The number of waits and of blocking uploads is the same for one micro-batch and for two: an optimizer step
waits once, for the decision whether all ranks take it, and an update twice more, for its metrics.
"""

import pytest

from tests.gpu_sim.cases import CASES, LEARNED
from tests.gpu_sim.report import listed

every = pytest.mark.parametrize("case", CASES["learner"])
updates = pytest.mark.parametrize("what", LEARNED)
micros = pytest.mark.parametrize("number", [1, 2])
# A collective on numbers of the host waits for the device and for its result, and uploads the numbers.
COLLECTIVE_WAITS, COLLECTIVE_UPLOADS = 2, 1
COLUMNS = 15  # of an experience


@every
def test_no_operation_mixes_devices(report_of, case):
    report = report_of("learner", case)
    assert not report.mixed, listed(report.mixed)


@updates
@micros
def test_waits_of_an_update(report_of, what, number):
    report = report_of("learner", f"{what} {number} micro-batches")
    allowed = report.facts["steps"] + 2
    if what == "first_forward":  # the log-probs of all micro-batches come back at once and are summed
        allowed += 1 + COLLECTIVE_WAITS
    assert report.waits.total() == allowed, listed(report.waits)


@updates
@micros
def test_blocking_uploads_of_an_update(report_of, what, number):
    report = report_of("learner", f"{what} {number} micro-batches")
    allowed = COLLECTIVE_UPLOADS if what == "first_forward" else 0
    assert report.blocking_uploads.total() == allowed, listed(report.blocking_uploads)


@updates
def test_an_update_has_the_expected_micro_batches(report_of, what):
    for number in (1, 2):
        facts = report_of("learner", f"{what} {number} micro-batches").facts
        assert facts["steps"] == (2 if what == "ppo" else 1)
        assert facts["backwards"] == facts["steps"] * (number + 2 * (what == "ptx"))


@pytest.mark.parametrize("forwards", [1, 2])
def test_waits_of_making_experience(report_of, forwards):
    report = report_of("learner", f"experience {forwards} forwards")
    # one collective for the number of forwards, two for whitening, two for the widths of the gathered rows
    collectives = 5
    models, metrics = 3, 2  # one wait for all outputs of a model; sums and maxima
    allowed = collectives * COLLECTIVE_WAITS + models + metrics + COLUMNS
    assert report.waits.total() == allowed, listed(report.waits)
    assert report.blocking_uploads.total() == collectives * COLLECTIVE_UPLOADS, listed(
        report.blocking_uploads
    )
