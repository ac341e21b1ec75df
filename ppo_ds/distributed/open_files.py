"""Limit of open files of this process, which bounds the number of its sockets and therefore of ranks."""

from __future__ import annotations

import resource
from contextlib import suppress

from ppo_ds.errors import UserError

# Descriptors that a rank opens per rank of the run: a socket in each of two communicators (torch's default
# group and DeepSpeed's copy of it), two connections to the store, which rank 0 hosts, and a pidfd
# (distributed/watchdog.py). Counted with gloo; the sockets of NCCL depend on its transport and were not
# counted.
FILES_PER_RANK = 5
OTHER_FILES = 128  # logs, data files, HTTP connections
# The limit that is set if the hard limit allows it. It is not the hard limit itself, which containers set to
# a billion, because some programs close each possible descriptor before they start another program.
USUAL_LIMIT = 65536


def open_files_needed(ranks: int) -> int:
    """Returns an estimate of the number of open files of a rank in a run of ``ranks`` ranks."""
    return FILES_PER_RANK * ranks + OTHER_FILES


def raise_open_files_limit(ranks: int) -> None:
    """Increases the soft limit of open files of this process and its future children. Not a collective.

    Many systems have a soft limit of 1024, which about 200 ranks exceed, and a much higher hard limit. Raises
    UserError if the hard limit is too low for ``ranks``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(ranks)
    wanted = max(needed, USUAL_LIMIT)
    if hard != resource.RLIM_INFINITY:
        if hard < needed:
            raise UserError(
                f"ulimit -Hn={hard}: the hard limit of open files is too low for {ranks} ranks, each of "
                f"which may open {needed}; raise it on each node (LimitNOFILE of the service that starts the "
                f"ranks, /etc/security/limits.conf, or docker run --ulimit nofile={USUAL_LIMIT})"
            )
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError):  # macOS has a lower limit that getrlimit does not show
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
