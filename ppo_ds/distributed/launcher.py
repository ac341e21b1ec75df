"""Whether the launcher that started this rank is still there.

A signal to the ``deepspeed`` command ends it alone: its ranks train on, hold the port and the GPUs, and write where the next start writes.
"""

from __future__ import annotations

import os
from pathlib import Path


def launchers() -> tuple[int, ...]:
    """The process ids of this rank's launchers: parent and grandparent under ``deepspeed``, the parent under ``torchrun``, none for plain python.

    Once one of them has ended, this is no longer what it was at the start.
    """
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return (parent,)
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended just now, or this system has no /proc
        return ()
    return (parent, grandparent) if b"deepspeed.launcher.launch" in command else ()
