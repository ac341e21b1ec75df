"""Reads files of run directories and model folders, which may be untrusted, with limits of size and depth."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ppo_ds.errors import UserError

MAX_BYTES = 64 * 1024**2  # of a file of text or JSON
MAX_YAML_BYTES = 256 * 1024  # PyYAML can take seconds for them
MAX_LINES_BYTES = 1024**3  # of a file with a line of JSON for each step
MAX_DEPTH = 100  # levels of nested lists and mappings
MAX_BITS = 15_000  # of an integer; json refuses more than 4,300 digits, YAML has no limit
_VALUES = (str, int, float, dict, list, type(None))


class DamagedFile(UserError):
    """Raised for a file that is not in the expected format."""


def open_file(file: Path, root: Path | None = None) -> BufferedReader:
    """Opens a regular file. Never blocks, unlike opening a pipe.

    Raises UserError if it is not a regular file, or if a link leads out of ``root`` (default: its folder).
    """
    if not is_below(file, root or file.parent):
        raise UserError(f"{file}: is reached by a symbolic link to a file elsewhere; replace the link")
    stream = open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise UserError(f"{file}: is no regular file; remove it")
    return stream


def read_text(file: Path, root: Path | None = None, limit: int = MAX_BYTES) -> str:
    """Returns the text of a file; raises UserError for over ``limit`` bytes, and as ``open_file`` does."""
    with open_file(file, root) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{file}: has more than {limit // 1024:,} KiB; remove it")
    return content.decode(errors="replace")


def read_json(file: Path, root: Path | None = None) -> Any:
    """Returns the content of a JSON file. Raises DamagedFile if invalid, UserError if too large or deep."""
    return _parsed(file, json.loads, read_text(file, root))


def read_yaml(file: Path, root: Path | None = None) -> Any:
    """Returns the content of a YAML file, as ``read_json`` does; raises UserError for aliases too."""
    return _parsed(file, lambda text: _Loader(text).get_single_data(), read_text(file, root, MAX_YAML_BYTES))


def read_checked(file: Path, model: type[BaseModel]) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises UserError with the invalid key if ``model`` rejects it."""
    content = read_json(file)
    try:
        model.model_validate(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "content"
        raise UserError(f"{file}: {key}={first['input']!r}: {first['msg']}; use another file") from error
    return content


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise RecursionError("a short text with aliases can stand for a tree of any size or depth")
        return super().compose_node(parent, index)


def _parsed(file: Path, parse: Callable[[str], Any], text: str) -> Any:
    try:
        if is_plain(tree := parse(text)):
            return tree
    except (ValueError, LookupError, AttributeError, yaml.YAMLError) as error:  # PyYAML raises all of them
        raise DamagedFile(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    except RecursionError:
        pass
    raise UserError(f"{file}: has aliases, over {MAX_DEPTH} levels or values that no run writes; remove it")


def is_plain(tree: Any) -> bool:
    """Returns whether a tree has only JSON values, string keys and at most MAX_DEPTH levels."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        mappings = [item for item in level if isinstance(item, dict)]
        if not all(isinstance(key, str) for mapping in mappings for key in mapping):
            return False
        for item in level:
            if not isinstance(item, _VALUES) or (isinstance(item, int) and item.bit_length() > MAX_BITS):
                return False
        inner = [value for mapping in mappings for value in mapping.values()]
        inner += [value for item in level if isinstance(item, list) for value in item]
        # each object once: with objects that occur twice, the time would otherwise grow exponentially
        level = list({id(value): value for value in inner}.values())
    return not level


def entries_from_elsewhere(folder: Path) -> Iterator[str]:
    """Yields a line for each symbolic link that leads out of ``folder``, and each pipe or device in it."""
    root = folder.resolve()
    for directory, folders, files in os.walk(root):
        for path in (Path(directory, name) for name in sorted([*folders, *files])):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode) and not is_below(path, root):
                yield f"{path.relative_to(root)} is a symbolic link to a file elsewhere; replace the link"
            elif not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                yield f"{path.relative_to(root)} is neither a file nor a directory; remove it"


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Limits the process inside the block to ``more`` bytes of memory above its present use (Linux only)."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError):  # not Linux
        most = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + more
        if all(limit == resource.RLIM_INFINITY or most < limit for limit in limits):
            resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def is_below(path: Path, folder: Path) -> bool:
    """Returns whether a path is in ``folder`` after all links are followed."""
    root = folder.resolve()
    # in the Hub's cache, snapshots/REVISION links to ../../blobs, which also counts as inside
    places = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    return any(Path(os.path.realpath(path)).is_relative_to(place) for place in places)
