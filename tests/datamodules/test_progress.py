"""Progress on standard error: a bar on a terminal, one line elsewhere, nothing where there is little to do."""

import io
import sys

import pytest

from datamodules.utils.progress import progress_bar


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("total", [19_999, 20_000])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal: bool, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("tokenising", total) as advance:
        advance(5_000)
        during = stream.getvalue()
        advance(total - 5_000)
    after = stream.getvalue()
    if total < 20_000:
        assert after == ""
    elif terminal:
        assert "tokenising" in after and "100%" in after  # drawn at the end, and then
        assert after.endswith("\x1b[2K")  # wiped
    else:
        assert during == after == "tokenising (20,000)\n"
