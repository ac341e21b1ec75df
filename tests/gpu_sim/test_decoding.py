"""Tests decoding with the static backend on the simulated GPU.

The host waits once per check, which comes after CHECK tokens, and twice at the end, for tokens and log-probs.
Stop strings add one wait per check, except for the last one, which finds all responses at their limits.
"""

import pytest

from tests.gpu_sim.cases import CASES
from tests.gpu_sim.report import listed

CHECK = 16
every = pytest.mark.parametrize("case", CASES["decoding"])


@every
def test_the_host_waits_only_at_checks_and_no_upload_blocks(report_of, case):
    report = report_of("decoding", case)
    checks = report.facts["steps"] // CHECK
    allowed = checks + 2 + (checks - 1 if case == "stop strings" else 0)
    assert report.waits.total() == allowed, listed(report.waits)
    assert not report.blocking_uploads, listed(report.blocking_uploads)


@every
def test_all_but_the_first_steps_are_replays_and_a_capture_neither_waits_nor_uploads(report_of, case):
    report = report_of("decoding", case)
    facts = report.facts
    assert facts["warm_ups"] + facts["replays"] == facts["steps"]
    assert 0 < facts["captures"] == facts["warm_ups"] <= 2
    assert not report.in_capture, listed(report.in_capture)


def test_a_step_launches_few_kernels_and_none_for_stop_strings_or_waves(report_of):
    """Qwen2 with one layer launches 133 kernels per token with all filters; see docs/dev/performance.md."""
    kernels = {case: report_of("decoding", case).facts["kernels"] for case in CASES["decoding"]}
    assert kernels["stop strings"] == kernels["two waves"] == kernels["qwen2"]
    assert 100 < kernels["qwen2"] <= 140
