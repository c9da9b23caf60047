"""Only regular files are read, what is written replaces a link instead of following it, and
progress is shown only if it takes a while."""

import io
import os
import sys
import time
from pathlib import Path

import pytest

from datamodules.utils.files import open_regular, read_bytes, regular_files, replacing, write_text
from datamodules.utils.progress import progress_bar


def test_pipes_devices_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError) as caught:
            open_regular(path)
        assert caught.value.filename == str(path)


def test_links_are_followed_if_allowed(tmp_path: Path) -> None:
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


def test_errors_name_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        write_text(tmp_path / "missing" / "file", "new")
    assert caught.value.filename == str(tmp_path / "missing" / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as caught, replacing(tmp_path / "folder") as partial:
        partial.write_text("new")
    assert str(caught.value.filename) == str(tmp_path / "folder")
    assert not list(tmp_path.glob(".*"))


def test_all_that_is_no_regular_file_is_named(tmp_path: Path) -> None:
    bad_name = os.fsdecode(b"caf\xe9")
    for name in ("deep/a.txt", f"{bad_name}/a.txt", ".hidden/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    links = {"link.txt": "deep/a.txt", "folder": "deep", "broken": "nowhere", "loop": "loop"}
    for name, target in {**links, "device": "/dev/zero", ".hidden/broken": "nowhere"}.items():
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    faults: dict[str, str] = {}
    found = regular_files(tmp_path, faults.__setitem__)
    assert found == [tmp_path / "deep" / "a.txt", tmp_path / "link.txt"]
    names = ("folder", "broken", "device", "loop", "pipe", "caf\\xe9/a.txt")
    assert faults.keys() == {str(tmp_path / name) for name in names} and all(faults.values())
    assert regular_files(tmp_path / "deep", faults.__setitem__, lambda path: False) == []


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("total", [19_999, 20_000])
@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_progress(stream: io.StringIO, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream.seek(0)
    stream.truncate()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("tokenising", total) as advance:
        advance(5_000)
        during = stream.getvalue()
        advance(total - 5_000)
    after = stream.getvalue()
    if total < 20_000:
        assert after == ""
    elif stream.isatty():
        assert "tokenising" in after and "100%" in after  # drawn at the end, and then
        assert after.endswith("\x1b[2K")  # wiped
    else:
        assert during == after == "tokenising (20,000)\n"


def test_progress_without_a_terminal_has_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datamodules.utils.progress.LINE_EVERY", 1.0)
    with progress_bar("tokenising", 20_000) as advance:
        advance(1_500)
        time.sleep(1.0)
        advance(1_500)
        advance(1_500)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["tokenising (20,000)", "tokenising: 3,000 of 20,000"]
