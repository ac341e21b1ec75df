"""Tests that the next tensor reuses the freed memory of a tensor without page faults."""

import platform
import subprocess
import sys

import pytest

# 64 MB exceeds 32 MB, the highest threshold to which glibc adapts: by default, such a block is returned to
# the kernel. Versions of glibc differ in the number of allocations (up to about 9) after which they reuse the
# kept heap, hence the warm-up.
SCRIPT = """
import resource, sys, torch
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    from ppo_ds.distributed.memory import keep_freed_memory
    assert keep_freed_memory()
for _ in range(12):
    torch.ones(2**24)  # 64 MB: 16,384 pages
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    return int(
        subprocess.run(
            [sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_tensor_reuses_the_pages_of_the_one_before():
    fresh, kept = page_faults("returned"), page_faults("kept")
    assert kept < 0.05 * fresh
