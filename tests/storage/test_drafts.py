"""Tests that drafts replace their target as a whole, and never open a file that already exists."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from ppo_ds.storage import drafts
from ppo_ds.storage.drafts import draft_directory, draft_file, open_for_appending, remove_drafts, write_file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("data", "content"), [("aü\n", "aü\n".encode()), (b"\0\xff", b"\0\xff"), ("\ud800", b"?")]
)
def test_a_file_is_replaced_as_a_whole(tmp_path, data, content):
    file = tmp_path / "a.txt"
    for _ in range(2):
        write_file(file, data)
        assert file.read_bytes() == content and names(tmp_path) == ["a.txt"]


def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(RuntimeError, match="disk"), draft_file(file) as stream:
        stream.write(b"new")
        assert len(names(tmp_path)) == 2
        raise RuntimeError("disk")
    assert file.read_text() == "old" and names(tmp_path) == ["a.txt"]


def test_a_killed_writer_leaves_the_old_file_and_a_draft_that_is_removed(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    code = (
        "import os, sys, pathlib\nfrom ppo_ds.storage.drafts import draft_file\n"
        "with draft_file(pathlib.Path(sys.argv[1])) as f:\n"
        "    f.write(b'new'); f.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False).returncode == -9
    assert file.read_text() == "old" and len(names(tmp_path)) == 2
    remove_drafts(tmp_path)
    assert file.read_text() == "old" and names(tmp_path) == ["a.txt"]


def test_a_draft_does_not_open_what_is_there_under_its_name(tmp_path, monkeypatch):
    """The draft's name can be guessed here."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    draft = tmp_path / "run" / ".tmp_a_0123456789abcdef"
    draft.parent.mkdir()
    draft.symlink_to(victim)
    monkeypatch.setattr(drafts, "draft_path", lambda path: draft)
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "run" / "a", "theirs")
    draft.symlink_to(victim) if not draft.is_symlink() else None
    with pytest.raises(FileExistsError), draft_directory(tmp_path / "run" / "a"):
        pass
    assert victim.read_text() == "mine"


def test_a_link_at_the_target_is_replaced_and_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in "a", "b":
        (tmp_path / name).symlink_to(victim)
    write_file(tmp_path / "a", "new")
    assert victim.read_text() == "mine" and (tmp_path / "a").read_text() == "new"
    assert not (tmp_path / "a").is_symlink()
    with pytest.raises(OSError, match="(?i)not a directory"), draft_directory(tmp_path / "b") as draft:
        (draft / "x").write_text("x")
    assert victim.read_text() == "mine"


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    target = tmp_path / "deep" / "model"
    for content in "old", "new":
        with draft_directory(target) as draft:
            (draft / "sub").mkdir()
            (draft / "sub" / content).write_text(content)
            assert target.exists() == (content == "new")
    assert names(target / "sub") == ["new"] and names(target.parent) == ["model"]
    with pytest.raises(RuntimeError), draft_directory(target) as draft:
        raise RuntimeError
    assert names(target / "sub") == ["new"] and names(target.parent) == ["model"]


def test_everything_in_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    fsync, synced, target = os.fsync, set(), tmp_path / "model"

    def recorded(descriptor):
        synced.add((os.fstat(descriptor).st_ino, target.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    with draft_directory(target) as draft:
        (draft / "sub").mkdir()
        for file in (draft / "a", draft / "sub" / "b"):
            file.write_text("content")
    inside = {path.stat().st_ino for path in (target, *target.rglob("*"))}
    assert len(inside) == 4
    assert synced == {(inode, False) for inode in inside} | {(tmp_path.stat().st_ino, True)}


def test_modes_are_those_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "a", "x")
        with draft_directory(tmp_path / "b"):
            pass
        open_for_appending(tmp_path / "c").close()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abc"]
    assert modes == [0o640, 0o750, 0o640]


def test_only_drafts_are_removed_and_links_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".tmp_a_0123456789abcdef").symlink_to(outside)
    inner = folder / ".tmp_b.txt_0123456789abcdef"
    inner.mkdir()
    (inner / "link").symlink_to(outside)
    remove_drafts(folder, older_than=50)
    assert len(names(folder)) == 2
    for kept in (".tmp_mine", "tmp_a_0123456789abcdef", ".tmp_a_0123456789abcdeX", "a"):
        (folder / kept).touch()
    remove_drafts(folder, name="b")
    assert len(names(folder)) == 6
    remove_drafts(folder, name="b.txt")
    assert len(names(folder)) == 5
    remove_drafts(folder)
    remove_drafts(tmp_path / "absent")
    assert names(folder) == [".tmp_a_0123456789abcdeX", ".tmp_mine", "a", "tmp_a_0123456789abcdef"]
    assert names(outside) == ["x"]


def test_appending_refuses_links_and_special_files(tmp_path):
    file, link, pipe = tmp_path / "a", tmp_path / "link", tmp_path / "pipe"
    for text in "xy":
        with open_for_appending(file) as stream:
            stream.write(text)
    assert file.read_text() == "xy"
    link.symlink_to(file)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in link, pipe:
        with pytest.raises(OSError, match="(?i)symbolic links|regular file"):
            open_for_appending(path)
    os.close(reader)
    with pytest.raises(OSError, match="(?i)no such device"):  # the pipe has no reader; opening must not block
        open_for_appending(pipe)
    assert file.read_text() == "xy"
