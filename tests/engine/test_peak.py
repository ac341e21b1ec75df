"""How the limits are counted, with a clock of our own; and that those of this machine are plausible."""

import torch

from ppo_ds.engine import peak as limits

CPU = torch.device("cpu")


def seconds_of(monkeypatch, seconds: float) -> None:
    """Every action takes so long, so that what is left is the counting."""
    monkeypatch.setattr(limits, "_best_seconds", lambda action, device, budget: action() is None or seconds)


def test_a_product_counts_two_flops_for_each_multiplication(monkeypatch):
    seconds_of(monkeypatch, 0.5)
    monkeypatch.setitem(limits.GEMM_SHAPES, "cpu", ((2, 3, 4),))
    assert limits.gemm_flops_per_s(CPU, torch.float32) == 96.0  # 2 x 2 x 3 x 4 / 0.5


def test_the_fastest_shape_is_the_limit(monkeypatch):
    seconds_of(monkeypatch, 1.0)
    monkeypatch.setitem(limits.GEMM_SHAPES, "cpu", ((2, 3, 4),))
    assert limits.gemm_flops_per_s(CPU, torch.bfloat16, shapes=[(1, 1, 1), (10, 10, 10)]) == 2000.0


def test_a_copy_reads_and_writes_each_byte(monkeypatch):
    seconds_of(monkeypatch, 0.25)
    assert (
        limits.bytes_per_s(CPU, size=8192) == 65536.0
    )  # 2 x 8192 / 0.25; the product with a vector, which only reads, is half of that


def test_limits_of_this_machine_are_plausible():
    assert 1e8 < limits.gemm_flops_per_s(CPU, torch.float32, seconds=0.01) < 1e16
    assert 1e7 < limits.bytes_per_s(CPU, size=2**22, seconds=0.01) < 1e14


def test_the_first_run_and_the_slow_ones_do_not_count(monkeypatch):
    clock, durations = [0.0], iter([50.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr(limits, "_now", lambda device: clock[0])

    def action() -> None:
        clock[0] += next(durations)

    assert limits._best_seconds(action, CPU, seconds=0.0) == 2.0
