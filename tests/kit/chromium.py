"""Headless Chromium controlled through ChromeDriver: screenshots, scripts, keys and console messages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["FAULTS", "READY", "Browser", "browser", "missing"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWERING = 300.0
"""Timeout in seconds for answers of the driver, and for a condition."""

READY = "document.querySelector('h1') && !document.getElementById('view').hasAttribute('aria-busy')"
"""Whether a view of ``hexdata browse`` is complete."""

FAULTS = Path(__file__).with_name("faults.js").read_text(encoding="utf-8")


def missing() -> str:
    """Return the name of a missing program, or an empty text."""
    if not any(map(shutil.which, BROWSERS)):
        return "no Chromium is installed"
    return "" if shutil.which("chromedriver") else "no chromedriver is installed"


class Browser:
    """A browser tab."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, address: str | Path, **window: Any) -> None:
        """Open an address or a file in a window; ``window`` as for :meth:`show`."""
        self.show(**window)
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        _call(f"{self._session}/url", {"url": url})

    def open_view(self, address: str, view: str, **window: Any) -> None:
        """Open a view of ``hexdata browse`` from scratch."""
        self.open("about:blank", **window)
        self.open(f"{address}#{view}", **window)
        self.wait_for(READY)

    def show(
        self, *, width: int = 1200, height: int = 900, dark: bool = False, media: str = "screen"
    ) -> None:
        """Change the window and the media preferences of the page that is open."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def run(self, script: str) -> Any:
        """Run a script and return its result."""
        return _call(f"{self._session}/execute/sync", {"script": script, "args": []})

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + ANSWERING
        while not self.run(f"return {condition}"):
            assert time.monotonic() < deadline, condition
            time.sleep(0.05)

    def cdp(self, command: str, **parameters: Any) -> Any:
        """Return the answer to a command of the DevTools protocol."""
        return _call(f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def complaints(self) -> list[str]:
        """Return the console messages since the last call."""
        return [entry["message"] for entry in _call(f"{self._session}/se/log", {"type": "browser"})]

    def faults(self, width: int, *, dark: bool) -> dict[str, Any]:
        """Return what is wrong with the page in a window of this width and scheme, by fault."""
        self.show(width=width, dark=dark)
        script = f"{FAULTS} return Object.entries(faults).map(([name, find]) => [name, find()])"
        found = {name: elements for name, elements in self.run(script) if elements}
        ground = re.findall(r"\d+", self.run("return getComputedStyle(document.body).backgroundColor"))
        needed = self.run("return document.documentElement.scrollWidth")
        others = {"wrong scheme": (int(ground[0]) < 64) != dark, "scrolls sideways": needed > width}
        return found | {name: True for name, is_wrong in others.items() if is_wrong}

    def press(self, key: str) -> None:
        """Press a key."""
        enter = {"code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.cdp("Input.dispatchKeyEvent", type=kind, key=key, **enter)

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a profile below ``folder``; stop it when the block ends."""
    command = ["chromedriver", "--port=0", f"--log-path={folder / 'chromedriver.log'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        try:
            said = ""
            while not (port := re.search(r"started successfully on port (\d+)", said)):
                line = driver.stdout.readline()
                assert line, said
                said += line
            arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            options = {
                "binary": next(filter(None, map(shutil.which, BROWSERS))),
                "args": [*arguments, "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"],
            }
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            capabilities = {"capabilities": {"alwaysMatch": {"browserName": "chrome", **wanted}}}
            sessions = f"http://127.0.0.1:{port[1]}/session"
            session = f"{sessions}/{_call(sessions, capabilities)['sessionId']}"
            try:
                yield Browser(session)
            finally:
                _call(session, None, "DELETE")
        finally:
            driver.terminate()
            driver.communicate()


def _call(url: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWERING) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(error.read().decode()) from error
