"""Tests peak rates with a simulated clock."""

from itertools import count

import torch

from ppo_ds.engine.peak import best_seconds, bytes_per_s, gemm_flops_per_s

CPU = torch.device("cpu")
CUBE = 2 * 1024**3  # FLOPs of the shape that is measured on a CPU by default


def ticking(seconds: float):
    """Returns a clock that advances by ``seconds`` per reading, so that each action takes that long."""
    readings = count()
    return lambda: next(readings) * seconds


def test_a_product_counts_two_flops_for_each_multiplication():
    assert gemm_flops_per_s(CPU, torch.float32, seconds=0.0, clock=ticking(0.5)) == CUBE / 0.5


def test_the_fastest_shape_is_the_peak():
    shapes = [(1, 1, 1), (1024, 1024, 1025)]
    found = gemm_flops_per_s(CPU, torch.float32, shapes, seconds=0.0, clock=ticking(1.0))
    assert found == 2 * 1024 * 1024 * 1025
    assert gemm_flops_per_s(CPU, torch.float32, [(1, 1, 1)], seconds=0.0, clock=ticking(1.0)) == CUBE


def test_a_copy_reads_and_writes_each_byte():
    # 2 x 8192 / 0.25; the matrix-vector product only reads, so its rate is half of that
    assert bytes_per_s(CPU, size=8192, seconds=0.0, clock=ticking(0.25)) == 65536.0


def test_the_first_run_and_the_slow_ones_do_not_count():
    now, durations = [0.0], iter([50.0, 3.0, 2.0, 4.0])

    def action() -> None:
        now[0] += next(durations)

    assert best_seconds(action, 0.0, lambda: now[0]) == 2.0
