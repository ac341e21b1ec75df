"""Tests the warnings of presets that reproduce an error of a published loop."""

import pytest

from ppo_ds.config.warnings import warnings
from tests.ppo.preset_runs import PRESETS, composed

# a few words of the reason; vapo warns about the short responses of these tests
WARNED = {
    "deepspeed_chat": "whose value is not trained",
    "zysnlp": "decision to stop",
    "zysnlp_strict": "loses the score",
    "sequence_kl": "no baseline",
    "minimind": "did not generate the responses",
    "vapo": "gives lambda 0 to responses of up to 20 tokens",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_that_reproduce_an_error_report_it(preset):
    config = composed(preset, **({"prompts": 128} if preset == "sums" else {"prompts": 3, "samples": 2}))
    lines = warnings(config, hides_stops=config.algo.train_on_eos is False)
    assert len(lines) == (preset in WARNED)
    assert all(line.startswith("warning    algo: ") and WARNED[preset] in line for line in lines)
