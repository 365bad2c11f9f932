"""A headless Chromium driven over its own DevTools protocol, by the pipe that `--remote-debugging-pipe` opens.

Only what the tests of the report need: open a page as a screen of some width, light or dark, ask it, and photograph it.
https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-extensions",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
"""A run as root, in a container, on a machine without a display."""


def find_chromium() -> str | None:
    """The browser's command, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One browser process; pages are opened in it one after the other."""

    def __init__(self, command: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="smoe-chromium-", ignore_cleanup_errors=True)
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4: ours, which may be those, move away first.
        apart = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read_there, write_there)]
        actions = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, end, number) for number, end in zip((3, 4), apart, strict=True)]
        arguments = [command, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = os.posix_spawn(command, arguments, os.environ, file_actions=actions)
        for end in (read_there, write_there, *apart):
            os.close(end)
        self._in, self._out, self._unread = read_here, write_here, b""
        self._sent, self.events = 0, []

    def close(self) -> None:
        """End the process and remove its profile."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that come meanwhile are kept in `events`."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._sent:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return found["result"]
            self.events.append(found)

    def wait_for(self, method: str, session: str) -> dict[str, Any]:
        """The next event of one kind, which may have come already."""
        while True:
            for at, event in enumerate(self.events):
                if event.get("method") == method and event.get("sessionId") == session:
                    return self.events.pop(at)["params"]
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError("chromium ended")
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1400, height: int = 900, scheme: str = "light") -> "Page":
        """A page loaded on a screen of so many CSS pixels; phones (under 600 wide) have touch and a finer grid."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.screen(width, height)
        page.scheme(scheme)
        page.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return page


class Page:
    """One open tab."""

    def __init__(self, browser: Chromium, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command to this tab."""
        return self._browser.call(method, self._session, **params)

    def screen(self, width: int, height: int) -> None:
        """Set the window's size in CSS pixels."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def scheme(self, scheme: str, media: str = "") -> None:
        """Prefer light or dark colours, and show the page on another medium ("print")."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def faults(self) -> list[str]:
        """What the console holds of errors and warnings, and exceptions of scripts."""
        self.ask("0")  # whatever was on its way has come
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        logged = [event["params"]["entry"] for event in mine if event["method"] == "Log.entryAdded"]
        return (
            [entry["text"] for entry in logged if entry["level"] in ("error", "warning")]
            + [
                str(event["params"]["args"])
                for event in mine
                if event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning")
            ]
            + [
                str(event["params"]["exceptionDetails"])
                for event in mine
                if event["method"] == "Runtime.exceptionThrown"
            ]
        )

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        self.ask("0")
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]

    def photograph(self, path: Path, quality: int = 80) -> None:
        """Write a picture of what the window shows, as WebP or PNG by the name's end."""
        kind = {"format": "webp", "quality": quality} if path.suffix == ".webp" else {"format": "png"}
        shot = self.call("Page.captureScreenshot", **kind)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """The page on paper."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        """Close the tab and forget its events."""
        self._browser.call("Target.closeTarget", targetId=self._target)
        self._browser.events = [e for e in self._browser.events if e.get("sessionId") != self._session]
