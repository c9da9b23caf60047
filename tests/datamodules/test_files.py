"""Only regular files are read; what is written replaces a link instead of following it."""

import os
from pathlib import Path

import pytest

from datamodules.utils.files import open_regular, read_bytes, regular_files, replacing, write_text


def test_pipes_devices_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError) as caught:
            open_regular(path)
        assert caught.value.filename == str(path)


def test_links_are_followed_where_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"content"
    with pytest.raises(OSError):
        read_bytes(tmp_path / "link", follow=False)


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    for name in ("file", f".file.{os.getpid()}.tmp"):  # the second is what is written first
        (tmp_path / name).symlink_to("elsewhere")
    write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new" and not (tmp_path / "file").is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "file"]


def test_errors_name_the_file_and_not_the_one_beside_it(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        write_text(tmp_path / "missing" / "file", "new")
    assert caught.value.filename == str(tmp_path / "missing" / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as caught, replacing(tmp_path / "folder") as partial:
        partial.write_text("new")
    assert str(caught.value.filename) == str(tmp_path / "folder")
    assert not list(tmp_path.glob(".*"))


def test_all_that_is_no_regular_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").touch()
    (tmp_path / ".hidden").mkdir()
    for name, target in (
        ("link.txt", "deep/a.txt"),
        ("folder", "deep"),
        ("broken", "nowhere"),
        ("device", "/dev/zero"),
        ("loop", "loop"),
        (".hidden/broken", "nowhere"),
    ):
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    (tmp_path / os.fsdecode(b"caf\xe9") / "a.txt").touch()
    faults: dict[str, str] = {}
    found = regular_files(tmp_path, lambda name, fault: faults.update({name: fault}))
    assert found == [tmp_path / "deep" / "a.txt", tmp_path / "link.txt"]
    names = ("folder", "broken", "device", "loop", "pipe", "caf\\xe9/a.txt")
    assert faults.keys() == {str(tmp_path / name) for name in names} and all(faults.values())
    assert (
        regular_files(tmp_path / "deep", faults.__setitem__, lambda path: path.suffix == ".csv")
        == []
    )
