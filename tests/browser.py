"""A headless Chromium for tests of the page, driven over its DevTools protocol by a pair of pipes,
which needs no package: ``chrome --remote-debugging-pipe`` reads and writes JSON that ends in a zero
byte (https://chromedevtools.github.io/devtools-protocol/).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it has none as root, and only ever sees our own server
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

needs_browser = pytest.mark.skipif(
    not any(map(shutil.which, NAMES)), reason=f"none of {', '.join(NAMES)} is on PATH"
)


class Browser:
    """One page in a browser of its own; a context manager.

    Attributes:
        complaints: errors of scripts and of the page's policy so far.
    """

    PATIENCE = 180  # seconds before a test gives up; nothing waits for it to pass

    def __init__(self, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        program = next(filter(None, map(shutil.which, NAMES)))
        self._process = subprocess.Popen(
            [
                "bash", "-c", 'exec "$@" 3<&"$IN" 4>&"$OUT"', "bash",
                program, *FLAGS, f"--user-data-dir={profile}",
            ],
            env={**os.environ, "IN": str(theirs_in), "OUT": str(theirs_out)},
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._held, self._number = b"", 0
        self.complaints: list[str] = []
        self._context: str | None = None
        self.first_visit()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._session = None
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    # The protocol -----------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method's result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        give_up = time.monotonic() + self.PATIENCE
        while b"\0" not in self._held:
            assert time.monotonic() < give_up, "the browser doesn't answer"
            if select.select([self._in], [], [], 1)[0]:
                read = os.read(self._in, 1 << 20)
                assert read, "the browser has ended"
                self._held += read
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        if event.get("method") == "Page.javascriptDialogOpening":
            self._accept()

    def _accept(self) -> None:
        """Say yes to a question, without waiting: whoever asked it waits itself."""
        self._number += 1
        message = {
            "id": self._number,
            "method": "Page.handleJavaScriptDialog",
            "params": {"accept": True},
            "sessionId": self._session,
        }
        os.write(self._out, json.dumps(message).encode() + b"\0")

    # What a user does -------------------------------------------------------------------------

    def first_visit(self) -> None:
        """An empty page for which no site has kept anything; what an earlier page still writes as
        it is left stays with that one."""
        self._session, left = None, self._context
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        if left:
            self.call("Target.disposeBrowserContext", browserContextId=left)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.complaints.clear()

    def tab(self, url: str) -> str:
        """A second page beside this one, for which sites have kept the same; it is used from now
        on. What brings this one back, by :meth:`use`."""
        before, self._session = self._session, None
        target = self.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.open(url)
        return before

    def use(self, tab: str) -> str:
        """Go on in another tab -> the one that was used so far."""
        before, self._session = self._session, tab
        self.call("Page.bringToFront")
        return before

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def type(self, text: str) -> None:
        """What has the focus gets this text."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: str = "", *, alt: bool = False, shift: bool = False) -> None:
        """A key, by its name of DOM's: ``Enter``, ``Escape``, ``Tab``, ``n``."""
        numbers = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, " ": 32}
        params: dict[str, Any] = {"key": key, "code": code or key, "modifiers": alt + 8 * shift}
        params["windowsVirtualKeyCode"] = numbers.get(key, ord(key[0].upper()))
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **params, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def click(self, selector: str) -> None:
        """With the mouse, where the element is; it must be what is on top there."""
        quoted = json.dumps(selector)
        self.until(f"Boolean(document.querySelector({quoted})?.getClientRects().length)")
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({quoted}); "
            "e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect(); "
            "const p = [r.x + r.width / 2, r.y + r.height / 2]; "
            "const top = document.elementFromPoint(...p); "
            "return e.contains(top) ? p : [null, top?.outerHTML.slice(0, 200)]; })()"
        )
        assert x is not None, f"{selector} is covered by {y}"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    # What a user sees -------------------------------------------------------------------------

    def run(self, script: str) -> Any:
        """A script's value."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What stands in the first such element; "" where there is none."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def until(self, script: str) -> None:
        """Wait until it is true."""
        give_up = time.monotonic() + self.PATIENCE
        while not self.run(script):
            assert time.monotonic() < give_up, f"never {script}: {self.text('body')[:2000]}"
            time.sleep(0.05)

    def picture(self, file: str | Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        Path(file).write_bytes(base64.b64decode(data))
