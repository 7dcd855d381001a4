"""Chromium without a window, by its DevTools protocol over a pipe.

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_SECONDS = 30
ARGUMENTS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which root needs
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--no-proxy-server",
]


class Chromium:
    """A running Chromium with one tab; it ends when the block is left.

    Attributes:
        errors: What the console has had of errors and warnings.
    """

    def __enter__(self) -> "Chromium":
        self.folder = tempfile.TemporaryDirectory()
        read_there, self.write_fd = os.pipe()
        self.read_fd, write_there = os.pipe()
        # The descriptors have to be 3 and 4 there.
        line = ["bash", "-c", f'exec "$@" 3<&{read_there} 4>&{write_there}', "bash", PROGRAM]
        self.process = subprocess.Popen(
            [*line, *ARGUMENTS, f"--user-data-dir={self.folder.name}", "about:blank"],
            pass_fds=(read_there, write_there),
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self.rest = b""
        self.number = 0
        self.session: str | None = None
        self.loads = 0
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_) -> None:
        self.session = None
        self.call("Browser.close")
        self.process.wait(WAIT_SECONDS)
        os.close(self.write_fd)
        os.close(self.read_fd)
        self.folder.cleanup()

    def call(self, method: str, **parameters) -> dict:
        """Call a method of the protocol, and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_fd, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def view(self, width: int, scheme: str, height: int = 800) -> None:
        """Set the size of the window, and whether it is light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        """Open an address, and wait until it is loaded."""
        self.load(lambda: self.call("Page.navigate", url=address))

    def load(self, act: Callable[[], object]) -> None:
        """Do what loads a document, and wait until it is loaded."""
        before = self.loads
        act()
        while self.loads == before:
            self._note(self._next())

    def evaluate(self, expression: str):
        """Return the value of an expression of JavaScript."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def controls(self) -> list[tuple[str, str]]:
        """Return role and name of what one can use, as a screen reader gets them."""
        self.call("Accessibility.enable")
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "link", "checkbox", "searchbox", "combobox", "spinbutton", "region"}
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles
        ]

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _next(self) -> dict:
        deadline = time.monotonic() + WAIT_SECONDS
        while b"\0" not in self.rest:
            assert select.select([self.read_fd], [], [], deadline - time.monotonic())[0], "it hangs"
            content = os.read(self.read_fd, 2**20)
            assert content, "Chromium has ended"
            self.rest += content
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self.loads += 1
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.errors.append(json.dumps(parameters))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(parameters))
