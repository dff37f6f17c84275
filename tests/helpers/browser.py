"""A headless Chromium, driven through its DevTools protocol over two pipes: the standard library is enough."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars")
TIMEOUT_S = 30.0
CODES = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}  # of keys that the browser itself acts on
_READS, _WRITES = 3, 4  # the file descriptors that Chromium takes commands from and answers on
_FREE = 10  # the first descriptor that cannot be one of them


def chromium() -> str | None:
    """Its path, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of the browser. ``errors``: what its console has been told of errors and warnings, and what was thrown."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._left, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> Any:
        """Raises RuntimeError for what the browser refuses, TimeoutError when it says nothing."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._left:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has said nothing for {TIMEOUT_S} s")
            got = os.read(self._answers, 1 << 20)
            if not got:
                raise RuntimeError("the browser has ended")
            self._left += got
        text, _, self._left = self._left.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str([each.get("value", each.get("description")) for each in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """A file, until its script is ready."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("window.mt && mt.ready")
        self.settle()

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is; promises are waited for. Raises RuntimeError for what it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", expression))
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not self.value(f"!!({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(f"expected {condition} within {TIMEOUT_S} s; console: {self.errors}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Until what was asked for has been drawn."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def key(self, key: str, text: str = "") -> None:
        text = text or (key if len(key) == 1 else "\r" if key == "Enter" else "")
        extra: dict[str, Any] = {"text": text} if text else {}
        extra |= {"windowsVirtualKeyCode": CODES[key]} if key in CODES else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def type(self, text: str) -> None:
        for letter in text:
            self.key(letter)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def move(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.settle()

    def click(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1, buttons=1 if kind == "mousePressed" else 0)
        self.settle()

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.mouse("mousePressed", x, y, button="left", clickCount=1, buttons=1)
        self.mouse("mouseMoved", (x + to_x) / 2, (y + to_y) / 2, button="left", buttons=1)
        self.mouse("mouseMoved", to_x, to_y, button="left", buttons=1)
        self.mouse("mouseReleased", to_x, to_y, button="left", clickCount=1)
        self.settle()

    def wheel(self, x: float, y: float, by: float) -> None:
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=by)
        self.settle()

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def _pipe() -> tuple[int, int]:
    """Its two ends, neither where Chromium's will be."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE) for fd in ends)
    for fd in ends:
        os.close(fd)
    return read, write


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser that ends with it. Raises RuntimeError where there is no Chromium."""
    path = chromium()
    if path is None:
        raise RuntimeError(f"expected one of {', '.join(NAMES)} on the path, found none; install chromium")
    takes, commands = _pipe()
    answers, gives = _pipe()

    def pipes() -> None:
        os.dup2(takes, _READS)
        os.dup2(gives, _WRITES)

    with tempfile.TemporaryDirectory(prefix="mtcompile-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=pipes,
            pass_fds=(_READS, _WRITES),
        )
        os.close(takes)
        os.close(gives)
        try:
            page = Page(commands, answers)
            page.attach()
            yield page
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(commands)
            os.close(answers)
