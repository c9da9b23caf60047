"""A real browser without a window, driven through the pipe of Chromium's DevTools protocol."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-dev-shm-usage --hide-scrollbars --window-size=1280,800 --remote-debugging-pipe"
)


class Browser:
    """One page; `events` are what the browser reports of requests, errors and the console."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        commands, self.write = os.pipe()
        self.read, answers = os.pipe()
        line = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]

        def place_pipes() -> None:
            """The browser reads commands from 3 and answers on 4."""
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
            for number, end in enumerate(ends, 3):
                os.dup2(end, number)

        self.process = subprocess.Popen(
            line,
            preexec_fn=place_pipes,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.number = 0
        self.buffer = b""
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.read)
        os.close(self.write)

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            part = os.read(self.read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(answer["error"]["message"])
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, code: str) -> Any:
        """The value of an expression of JavaScript, of a promise when it is there."""
        found = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def open(self, page: Path) -> None:
        """Opens a file and waits until it has drawn a tab."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.body && document.body.dataset.ready")

    def wait(self, condition: str) -> Any:
        """The value of a condition once it holds, for 20 s at most."""
        code = (
            f"new Promise((done, fail) => {{ const start = Date.now(); const look = () => "
            f"{{ const value = {condition}; if (value) done(value); else if (Date.now() - start > "
            f"20000) fail('never: ' + {condition!r}); else setTimeout(look, 20); }}; look(); }})"
        )
        return self.evaluate(code)

    def mouse(self, selector: str, x: float, y: float, click: bool = False) -> None:
        """Moves over a point of an element, given as fractions of its size, and may click."""
        code = f"document.querySelector({selector!r})"
        self.evaluate(f"{code}.scrollIntoView({{block: 'nearest'}})")
        box = self.evaluate(f"JSON.parse(JSON.stringify({code}.getBoundingClientRect()))")
        point = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **point)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **point)

    def tab(self, name: str) -> None:
        """Chooses a tab and waits until it is drawn."""
        buttons = "[...document.querySelectorAll('nav button')]"
        click = f"{buttons}.find(button => button.textContent === {name!r}).click()"
        self.evaluate(f"document.body.dataset.ready = ''; {click}")
        self.wait(f"document.body.dataset.ready === {name!r}")

    def picture(self, path: Path) -> None:
        """Writes a screenshot."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def requests(self) -> list[str]:
        """Addresses that the page asked for, but files and data inside it."""
        sent = [
            one["params"] for one in self.events if one["method"] == "Network.requestWillBeSent"
        ]
        return [one["request"]["url"] for one in sent]

    def errors(self) -> list[Any]:
        """Exceptions, and errors and warnings in the console."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [one["params"] for one in self.events if one["method"] in kinds]
