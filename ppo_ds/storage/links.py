"""Finds symbolic links in folders that may come from an untrusted source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def links_that_leave(folder: Path) -> Iterator[str]:
    """Yields the names of the symbolic links below ``folder`` whose targets are outside of it.

    Through such a link, any file of this machine could be saved from the folder. Links of the Hub's cache,
    from ``snapshots/REVISION`` to ``blobs`` beside ``snapshots``, stay in the cache.
    """
    root = folder.resolve()
    inside = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    for directory, folders, files in os.walk(root):
        for path in (Path(directory, name) for name in sorted([*folders, *files])):
            if path.is_symlink() and not any(
                Path(os.path.realpath(path)).is_relative_to(place) for place in inside
            ):
                yield str(path.relative_to(root))
