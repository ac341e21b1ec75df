"""Tests that reward models and held-out evaluations wait neither per forward nor per row."""

import pytest

from tests.gpu_sim.cases import ENCODERS, SCORERS
from tests.gpu_sim.report import listed

# Scoring: a collective on the number of forwards (two waits and an upload), and the scores of all texts.
SCORING_WAITS, SCORING_UPLOADS = 3, 1


@pytest.mark.parametrize("family", ENCODERS + SCORERS)
@pytest.mark.parametrize("forwards", [1, 2])
def test_waits_and_uploads_of_a_reward_model(report_of, family, forwards):
    report = report_of("scoring", f"{family} {forwards} forwards")
    assert report.waits.total() == SCORING_WAITS, listed(report.waits)
    assert report.blocking_uploads.total() == SCORING_UPLOADS, listed(report.blocking_uploads)


@pytest.mark.parametrize("rows", [2, 4])
def test_waits_and_uploads_of_an_evaluation(report_of, rows):
    report = report_of("scoring", f"evaluation of {rows} rows")
    # 32 tokens are two checks of 16; tokens and log-probs come back at the end
    batches, checks, ends = 2, 2, 2
    metrics, samples = 1, 2
    allowed = batches * (checks + ends + SCORING_WAITS) + metrics + samples
    assert report.waits.total() == allowed, listed(report.waits)
    assert report.blocking_uploads.total() == batches * SCORING_UPLOADS, listed(report.blocking_uploads)
