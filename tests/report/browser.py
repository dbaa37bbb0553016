"""Headless Chromium controlled through ChromeDriver: screenshots, scripts and console messages."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWERING = 300.0
"""Timeout in seconds for answers of the driver."""


def missing() -> str:
    """Return the name of a missing program, or None."""
    if not any(map(shutil.which, BROWSERS)):
        return "no Chromium is installed"
    return "" if shutil.which("chromedriver") else "no chromedriver is installed"


class Browser:
    """A browser tab."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, page: Path, **window: Any) -> None:
        """Open a file; ``window`` as for :meth:`open_address`."""
        self.open_address(page.resolve().as_uri(), **window)

    def open_address(
        self, address: str, *, width: int = 1200, height: int = 900, dark: bool = False, media: str = "screen"
    ) -> None:
        """Open an address in a window of this size with these media preferences."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", media=media, features=[scheme])
        _call(f"{self._session}/url", {"url": address})

    def run(self, script: str) -> Any:
        """Run a script and return its result."""
        return _call(f"{self._session}/execute/sync", {"script": script, "args": []})

    def cdp(self, command: str, **parameters: Any) -> Any:
        """Return the answer to a command of the DevTools protocol."""
        return _call(f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def complaints(self) -> list[str]:
        """Return the console messages since the last call."""
        return [entry["message"] for entry in _call(f"{self._session}/se/log", {"type": "browser"})]

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        size = self.cdp("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self.cdp("Page.printToPDF", preferCSSPageSize=True)["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a profile below ``folder``; stop it when the block ends."""
    log = folder / "chromedriver.log"
    driver = subprocess.Popen(
        ["chromedriver", "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE, text=True
    )
    try:
        host = f"http://127.0.0.1:{_port_of(driver)}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {
            "binary": next(filter(None, map(shutil.which, BROWSERS))),
            "args": [*arguments, "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"],
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = _call(f"{host}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(f"{host}/session/{session}")
        finally:
            _call(f"{host}/session/{session}", None, "DELETE")
    finally:
        driver.terminate()
        driver.communicate()


def _port_of(driver: subprocess.Popen[str]) -> int:
    """Return the port of a driver, once it is listening."""
    assert driver.stdout is not None
    said = []
    for line in driver.stdout:
        said.append(line)
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
    raise AssertionError(f"chromedriver ended: {''.join(said)}")


def _call(url: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWERING) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(error.read().decode()) from error
