"""Checks with a probe file whether processes on several nodes see the same directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ppo_ds.storage.drafts import draft_path, remove_drafts

PROBE = "shared"
# Seconds after which a probe counts as missing. By default, an NFS client that mounts with ``nocto`` may use
# cached entries of a directory for 30 s (acdirmin in nfs(5)) before it asks the server again.
VISIBLE_SECONDS = 35.0
POLL = 0.2


@contextmanager
def probe(directory: Path) -> Iterator[str]:
    """Creates a probe file in ``directory`` and yields its name; deletes the file at the end.

    No other process may have a probe there; probes left by killed processes are deleted first. A directory
    that did not exist before is deleted again if it is empty.
    """
    created = not directory.exists()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_drafts(directory, name=PROBE)
    path = draft_path(directory / PROBE)
    path.touch(exist_ok=False)  # exclusively: follows no link
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)
        if created:
            with suppress(OSError):  # it is not empty
                directory.rmdir()


def sees_probe(directory: Path, name: str) -> bool:
    """Returns whether another process's probe ``name`` appears within VISIBLE_SECONDS.

    An NFS client may answer from its cache. It asks the server again when a directory is opened
    (close-to-open consistency, nfs(5)), so every directory of the path is opened before the file.
    """
    deadline = time.monotonic() + VISIBLE_SECONDS
    path = directory.absolute() / name
    while True:
        for folder in reversed(path.parents):
            with suppress(OSError):  # no permission to list it, or it is missing
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        with suppress(OSError):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL)
