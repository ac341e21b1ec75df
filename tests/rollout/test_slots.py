"""Tests that the state of the slots is changed without copies of single numbers to the device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_ds.rollout.slots import Slots


class AssignedNumbers(TorchDispatchMode):
    """Collects assignments of a number to indices: on a GPU, index_put_ copies it to the device and waits."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index_put_.default and args[2].dim() == 0:
            self.found.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_responses_start_move_and_end_without_copies_of_numbers(sampling):
    slots = Slots(4, torch.tensor([5, 6, 7]), torch.zeros(3, 7, dtype=torch.float64), sampling(7))
    left, right = torch.tensor([0, 1]), torch.tensor([2, 3])
    with AssignedNumbers() as numbers:
        slots.counts[right] = 9
        assert numbers.found == [(4,)]
        slots.put(right, *torch.tensor([[1, 2], [8, 9], [3, 4], [0, 2]]))
        slots.move(right, left)
        slots.end(left[:1])
        assert numbers.found == [(4,)]
    assert slots.alive.tolist() == [False, True, False, False] and slots.counts.tolist() == [0, 2, 0, 2]
    assert [x[:2].tolist() for x in (slots.rows, slots.tokens, slots.positions)] == [[1, 2], [8, 9], [3, 4]]
