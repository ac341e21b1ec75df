"""Tests the PPO update and the computation of experience on the simulated GPU.

The number of waits and of blocking uploads is the same for one micro-batch and for two: an optimizer step
waits once, for the decision whether all ranks take it, and an update twice more, for its metrics.
"""

import pytest

from tests.gpu_sim.cases import LEARNED
from tests.gpu_sim.report import listed

updates = pytest.mark.parametrize("what", LEARNED)
micros = pytest.mark.parametrize("number", [1, 2])
# A collective on numbers of the host waits for the device and for its result, and uploads the numbers.
COLLECTIVE_WAITS, COLLECTIVE_UPLOADS = 2, 1
COLUMNS = 15  # of an experience


@updates
@micros
def test_waits_and_blocking_uploads_of_an_update(report_of, what, number):
    report = report_of("learner", f"{what} {number} micro-batches")
    steps = report.facts["steps"]
    assert steps == (2 if what == "ppo" else 1)
    assert report.facts["backwards"] == steps * (number + 2 * (what == "ptx"))
    # first_forward: the log-probs of all micro-batches come back at once and are summed
    summed = what == "first_forward"
    assert report.waits.total() == steps + 2 + summed * (1 + COLLECTIVE_WAITS), listed(report.waits)
    assert report.blocking_uploads.total() == summed * COLLECTIVE_UPLOADS, listed(report.blocking_uploads)


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
