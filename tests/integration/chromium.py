"""A headless Chromium: that of QtWebEngine, which comes as a Python package."""

import base64
import json
import os
import time
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # in containers there is none

from PyQt6.QtCore import QEventLoop, QUrl  # noqa: E402
from PyQt6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PyQt6.QtWidgets import QApplication  # noqa: E402

# Puts a file into an input as a user's choice does
CHOOSE = """
const bytes = Uint8Array.from(atob(%s), letter => letter.charCodeAt(0)), files = new DataTransfer();
files.items.add(new File([bytes], %s, {type: %s}));
const input = document.querySelector(%s);
input.files = files.files;
input.dispatchEvent(new Event("change", {bubbles: true}));
"""
TYPE = """
const field = document.querySelector(%s);
Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), "value").set.call(field, %s);
field.dispatchEvent(new Event("input", {bubbles: true}));
"""


class Chromium:
    """One page."""

    def __init__(self, width: int, height: int):
        self.application = QApplication.instance() or QApplication(["chromium"])
        self.view = QWebEngineView()
        self.view.resize(width, height)
        self.view.show()

    def open(self, address: str) -> None:
        done = []
        self.view.loadFinished.connect(done.append)
        self.view.setUrl(QUrl(address))
        self._until(lambda: done, f"{address} is loaded")
        assert done[0], f"{address} cannot be opened"

    def run(self, script: str):
        """What a function of this body returns, as plain values."""
        done = []
        self.view.page().runJavaScript(f"JSON.stringify((() => {{{script}}})() ?? null)", 0, done.append)
        self._until(lambda: done, script)
        return json.loads(done[0])

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        self._until(lambda: self.run(f"return Boolean({condition})"), condition)

    def text(self) -> str:
        return self.run("return document.body.innerText")

    def choose(self, field: str, path: Path, kind: str) -> None:
        """Put a file of a MIME type into the input of a selector."""
        content = base64.b64encode(path.read_bytes()).decode()
        self.run(CHOOSE % tuple(map(json.dumps, (content, path.name, kind, field))))

    def type(self, field: str, text: str) -> None:
        self.run(TYPE % (json.dumps(field), json.dumps(text)))

    def screenshot(self, path: Path, seconds: float = 1) -> None:
        end = time.monotonic() + seconds  # for what is drawn
        self._until(lambda: time.monotonic() > end, "")
        assert self.view.grab().save(str(path))

    def _until(self, condition, what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"after {seconds} s, not yet: {what}"
            self.application.processEvents(QEventLoop.ProcessEventsFlag.AllEvents, 50)
            time.sleep(0.01)
