"""Headless Chromium through its DevTools protocol, with nothing but the standard library.

The browser reads commands from its descriptor 3 and answers on 4, JSON with a NUL behind it: no
port, no driver, no web socket.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 20.0
_LOOK = 0.02
_BEGIN = """
import os, sys
os.dup2(int(sys.argv[1]), 100)  # first away from where the other one may be
os.dup2(int(sys.argv[2]), 4)
os.dup2(100, 3)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """The path of an installed Chromium."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(Exception):
    """A command failed, a script raised, or something did not come in time."""


class Browser:
    """One tab of a browser of its own, with an empty profile in `folder`.

    Attributes:
        complaints: what pages wrote to the console as errors, uncaught exceptions, and violations
            of their security policy.
        addresses: all that was requested.
    """

    def __init__(self, path: str, folder: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = [
            "--headless", "--remote-debugging-pipe", f"--user-data-dir={folder}",
            "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--disable-background-networking", "--disable-extensions", "--no-proxy-server",
            "about:blank",
        ]  # fmt: skip
        if os.geteuid() == 0:
            options.insert(0, "--no-sandbox")  # it wants a user other than root
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, str(to_read), str(to_write), path, *options],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )
        os.close(to_read)
        os.close(to_write)
        self._data = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.complaints: list[str] = []
        self.addresses: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._write)  # it ends by itself when nobody can command it
        os.close(self._read)
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result.

        Raises:
            BrowserError: the browser refuses, has ended, or does not answer.
        """
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") != number:
                continue
            if "error" in answer:
                raise BrowserError(f"{method}: {answer['error']}")
            result: dict[str, Any] = answer["result"]
            return result

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._data:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self._read], [], [], left)[0]:
                raise BrowserError(f"no answer within {_SECONDS:g} s")
            piece = os.read(self._read, 1 << 16)
            if not piece:
                raise BrowserError("the browser has ended")
            self._data += piece
        text, _, self._data = self._data.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.addresses.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.complaints.append(json.dumps(params["args"]))

    def open(self, url: str) -> None:
        """Goes to a page and waits until it has loaded."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def reload(self) -> None:
        """Loads the page anew and waits until it has loaded."""
        self.run("window.isOld = true")
        self.call("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def forget(self) -> None:
        """Empties the local storage of all sites that were asked: a later server may have the port
        of an earlier one."""
        sites = {"/".join(address.split("/")[:3]) for address in self.addresses}
        for site in sites:
            self.call("Storage.clearDataForOrigin", origin=site, storageTypes="local_storage")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise.

        Raises:
            BrowserError: it raises.
        """
        result = self.call(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        if "exceptionDetails" in result:
            raise BrowserError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = _SECONDS) -> None:
        """Until an expression is true.

        Raises:
            BrowserError: it does not become so in time.
        """
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText")
                raise BrowserError(f"never true: {condition}\n{text}\n{self.complaints}")
            time.sleep(_LOOK)

    def text(self, name: str) -> str:
        """The text of the element with this id."""
        return str(self.run(f"document.getElementById({json.dumps(name)}).textContent"))

    def type(self, text: str) -> None:
        """Text from the keyboard, to wherever the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, modifiers: int = 0) -> None:
        """One key, such as "Enter" or "Tab". `modifiers`: 2 is Ctrl, 8 Shift."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        event = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": modifiers,
        }
        if not modifiers and key in ("Enter", " "):
            event["text"] = "\r" if key == "Enter" else " "
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def media(self, scheme: str) -> None:
        """`scheme`: "dark" or "light"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        """Of the page in CSS pixels. `mobile`: as phones lay it out."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def screenshot(self, path: Path) -> None:
        """Writes what is seen as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))
