"""Memory that a step frees is there for the next step."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from sparring.backend.trainer.allocator import keep_freed_memory

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    a = torch.ones(48 << 20, dtype=torch.uint8)
    torch.cat([a, a])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert not {keep} or keep_freed_memory()
for _ in range(30):  # holes of the first steps are filled by those after them, how soon depends on the heap
    faults = step()
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
@pytest.mark.slow
def test_large_tensors_are_not_mapped_anew():
    def faults(keep: bool) -> int:
        code = FAULTS.format(keep=keep)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
        return int(done.stdout)

    assert faults(keep=False) >= 3 * (48 << 20) >> 16  # in pages of 64 KiB or less
    assert faults(keep=True) < 100
