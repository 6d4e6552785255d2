"""Drives a headless Chromium over the pipe of its DevTools protocol: no driver, no port, no package.

One browser serves all tests; each page records what it asked the network for and what its console said.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 60

OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-extensions", "--mute-audio", "--force-color-profile=srgb",
    "--hide-scrollbars", "--no-zygote", "--font-render-hinting=none",
)  # fmt: skip


def installed() -> str | None:
    """Return the browser's path, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser process; the protocol's messages are JSON that ends with a zero byte, on two pipes."""

    def __init__(self, profile: Path) -> None:
        program = installed()
        assert program is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def on_three_and_four() -> None:
            first, second = os.dup(to_browser), os.dup(from_browser)  # either may be 3 or 4 itself
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=on_three_and_four,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._rest = b""
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        """Open an empty page."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, fields: dict[str, Any] | None = None, session: str = "") -> dict[str, Any]:
        """Send a command and return its result; events that come before it go to their pages."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": fields or {}}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        number = self._number
        while (answer := self.receive()).get("id") != number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def receive(self) -> dict[str, Any]:
        """Return the next message, and tell its page of it."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], TIMEOUT_S)
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.hear(message["method"], message["params"])
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)  # it ends when its pipe does
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)


@dataclass
class Page:
    """One page; ``requests`` are the addresses it loaded, ``complaints`` what its console and log said."""

    browser: Browser
    session: str
    target: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    loaded: int = 0

    def hear(self, event: str, fields: dict[str, Any]) -> None:
        """Note what an event says."""
        if event == "Network.requestWillBeSent":
            self.requests.append(fields["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = fields["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(" ".join(str(a.get("value")) for a in fields["args"]))
        elif event == "Log.entryAdded":
            self.complaints.append(fields["entry"]["text"])
        elif event == "Page.javascriptDialogOpening":
            self.dialogs.append(fields["message"])
        elif event == "Page.loadEventFired":
            self.loaded += 1

    def call(self, method: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a command to this page."""
        return self.browser.call(method, fields, self.session)

    def open(self, address: str) -> None:
        """Go to an address and wait until it has loaded."""
        before = self.loaded
        self.call("Page.navigate", {"url": address})
        while self.loaded == before:
            self.browser.receive()

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        """Set the size of the window, in CSS pixels."""
        fields = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", fields)

    def prefer(self, scheme: str, medium: str = "") -> None:
        """Prefer ``dark`` or ``light`` as a system setting would; ``medium`` may be ``print``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", {"media": medium, "features": features})

    def eval(self, code: str) -> Any:
        """Return what an expression is, as JSON holds it; an exception fails the test."""
        fields = {"expression": code, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", fields)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has drawn two more frames."""
        self.eval("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def until(self, code: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + TIMEOUT_S
        while not self.eval(code):
            assert time.monotonic() < end, code
            self.settle()

    def press(self, key: str) -> None:
        """Press and release one key, by the name that scripts see."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", **fields, **text})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **fields})
        self.settle()

    def click(self, x: float, y: float) -> None:
        """Move to a place of the window and click there."""
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
        for kind in ("mousePressed", "mouseReleased"):
            fields = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", fields)
        self.settle()

    def shot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page, all of it where ``whole``."""
        fields = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            fields["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", fields)["data"]))


Factory = Callable[[], Page]
