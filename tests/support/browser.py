"""Drives a headless Chromium over a pipe, without a port, a driver program or a Python package.

The protocol is that of the Chrome DevTools (https://chromedevtools.github.io/devtools-protocol/). Messages
are JSON objects that end with a zero byte.
"""

import json
import os
import select
import shutil
import subprocess
import time

import pytest

TIMEOUT = 120.0  # seconds; the machine may be very busy
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--force-device-scale-factor=1", "--remote-debugging-pipe"),
)


def find_chromium():
    """Returns the path of a Chromium; without one, skips the test, or fails it in continuous integration."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    reason = "no chromium in PATH: apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class Browser:
    """A Chromium with one page. Records errors of the console and every request that is not for a file."""

    def __init__(self, executable, profile, *, width=1280, height=900):
        to_chromium, self._out = os.pipe()
        self._in, from_chromium = os.pipe()
        command = f'exec "$0" "$@" 3<&{to_chromium} 4>&{from_chromium}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_chromium, from_chromium),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_chromium)
        os.close(from_chromium)
        self._buffer, self._number, self._session = b"", 0, None
        self.errors, self.requests, self._loaded = [], [], 0
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def close(self):
        self._process.terminate()
        self._process.wait(TIMEOUT)
        os.close(self._in)
        os.close(self._out)

    # -- protocol --------------------------------------------------------------------------------------------

    def send(self, method, **params):
        """Sends a command and returns its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, params, answer["error"])
                return answer["result"]

    def _receive(self):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], TIMEOUT)
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, f"chromium gave no answer in {TIMEOUT:.0f} s, or ended"
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        self._record(message.get("method"), message.get("params", {}))
        return message

    def _record(self, event, params):
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(part.get("value")) for part in params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.requests.append(url)
        elif event == "Page.loadEventFired":
            self._loaded += 1

    # -- the page --------------------------------------------------------------------------------------------

    def open(self, path):
        """Opens a file and waits until it is loaded."""
        self._load("Page.navigate", url=f"file://{path}")

    def reload(self):
        self._load("Page.reload")

    def _load(self, method, **params):
        before = self._loaded
        self.send(method, **params)
        while self._loaded == before:
            self._receive()

    def resize(self, width, height, *, dark=False):
        """Sets the size of the window and the colour scheme of the system."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="", features=[scheme])

    def run(self, script):
        """Returns the value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, condition):
        """Waits until a JavaScript expression is true."""
        deadline = time.monotonic() + TIMEOUT
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not true after {TIMEOUT:.0f} s: {condition}"
            time.sleep(0.02)

    def text(self, selector):
        """Returns the text of the first element that matches."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector):
        """Returns the texts of all elements that match."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")

    def count(self, selector):
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def move_to(self, selector, x=0.5, y=0.5):
        """Moves the mouse into an element, to shares ``x`` and ``y`` of its size, and returns the point."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.wait_for(element)
        self.run(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        # two frames: observers of visibility have run, and the layout is final
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        box = self.run(f"(b => [b.x, b.y, b.width, b.height])({element}.getBoundingClientRect())")
        point = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        assert box[2] > 0 and box[3] > 0, f"{selector} is not visible"
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **point)
        return point

    def click(self, selector):
        """Clicks an element with the mouse, so that an element which something covers is not clicked."""
        point = self.move_to(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **point)

    def type(self, selector, text):
        """Replaces the text of a field."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        if text:
            self.send("Input.insertText", text=text)
        else:
            self.press("Delete")

    def press(self, key):
        """Presses a key of the focused element, such as ArrowRight."""
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Home": 36, "Delete": 46}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    def screenshot(self, *, whole_page=False):
        """Returns the picture as base64 of a PNG."""
        return self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)["data"]
