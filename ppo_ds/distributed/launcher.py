"""Process ids and launch id of the launcher that started this rank, and a free port for a launch.

A signal to the ``deepspeed`` command ends only that command. Its ranks would continue as orphans and occupy
the port, the GPUs and the run directory of the next launch. Each rank therefore watches its launchers' ids.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def launcher_pids() -> tuple[int, ...]:
    """Returns the process ids of this rank's launchers.

    These are the parent and the grandparent under ``deepspeed``, and the parent under ``torchrun``. Plain
    python has no launcher. When a launcher ends, its child gets a new parent, so the result changes.
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


def launch_id(environment: Mapping[str, str]) -> str:
    """Returns an identifier of the launch, the same for all of its ranks on the machine of rank 0.

    Two launches have different identifiers, unless both have no launcher and the same address and port.
    """
    address = (environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return " ".join([*address, *map(str, launcher_pids()[:1])])


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a port that is reserved for the ranks of one launch until the end of the block.

    The port's socket is bound but does not listen. A socket that sets SO_REUSEADDR, as torch's TCPStore does,
    can therefore listen on the port; the kernel assigns the port to no other program.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]
