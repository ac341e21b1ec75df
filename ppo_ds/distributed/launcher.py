"""Detection of the launcher that started this rank.

A signal to the ``deepspeed`` command ends that command alone: its ranks go on as orphans, hold the port and
the GPUs, and write into the run directory that the next start uses. A rank therefore watches its launchers'
process ids.
"""

from __future__ import annotations

import os
from pathlib import Path


def launcher_pids() -> tuple[int, ...]:
    """Returns the process ids of this rank's launchers.

    These are the parent and the grandparent under ``deepspeed``, the parent under ``torchrun`` and none for
    plain python. The result changes once one of them has ended, since the kernel then assigns this process a
    new parent.
    """
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return (parent,)
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # the parent has just ended, or this system has no /proc
        return ()
    return (parent, grandparent) if b"deepspeed.launcher.launch" in command else ()
