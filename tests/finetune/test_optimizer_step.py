"""Tests the optimizer step that the stages sft and reward_model share."""

import pytest


@pytest.mark.slow
def test_two_ranks_follow_the_gradient_of_the_global_mean_and_skip_together(rank_server):
    codes, output = rank_server.run("tests.finetune.step_worker:main", 2)
    assert codes == [0, 0], output
