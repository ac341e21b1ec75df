"""Memory that a tensor gave back is there for the next one, without the kernel's having to map and clear new pages."""

import platform
import subprocess
import sys

import pytest

# 64 MB is above 32 MB, the most to which glibc raises its own threshold of mapping: by default such a block always goes back to the kernel.
# Versions of glibc differ in how many allocations they take until they reuse the kept heap: up to about 9, hence the warm-up.
FAULTS = """
import resource, sys, torch
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    from ppo_ds.distributed.allocator import keep_freed_memory
    assert keep_freed_memory()
for _ in range(12):
    torch.ones(2**24)  # 64 MB: 16,384 pages
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    return int(
        subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_tensor_takes_the_pages_of_the_one_before():
    fresh, kept = faults("returned"), faults("kept")
    assert kept < 0.05 * fresh
