"""A real Chromium, driven over its debugging protocol: opens pages, types, clicks, looks, and hears every complaint.

Knows nothing of what the pages do. One message at a time over one socket, so that tests read from top to bottom.
"""

import asyncio
import base64
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage"
QUIET += " --allow-pre-commit-input"  # else a click soon after a page is there may be dropped
PATIENCE_S = 30.0  # far more than needed: a hang must fail, a slow machine must not
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "/": ("Slash", 191, "/"),
    "?": ("Slash", 191, "?"),
    **{letter: (f"Key{letter.upper()}", ord(letter.upper()), "") for letter in "cnrs"},
}
ALT, SHIFT = 1, 8


class Browser:
    """One Chromium process and the socket to it."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        command = [CHROMIUM, "--headless", *QUIET.split(), f"--user-data-dir={profile}", "--remote-debugging-port=0"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([*command, "about:blank"], stdin=quiet, stdout=quiet, stderr=quiet)
        self.loop = asyncio.new_event_loop()
        self.events: list[dict[str, Any]] = []
        self._number = 0
        try:
            port, path = self._address(profile / "DevToolsActivePort")
            self.loop.run_until_complete(self._connect(f"ws://127.0.0.1:{port}{path}"))
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _address(self, file: Path) -> Sequence[str]:
        end_s = time.monotonic() + 4 * PATIENCE_S
        while not (file.exists() and len(lines := file.read_text().split()) == 2):
            assert self.process.poll() is None, "chromium ended at once"
            assert time.monotonic() < end_s, "chromium does not open its debugging port"
            time.sleep(0.05)
        return lines

    async def _connect(self, url: str) -> None:
        self.http = aiohttp.ClientSession()
        self.socket = await self.http.ws_connect(url, max_msg_size=0)

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; what is heard meanwhile is kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        return self.loop.run_until_complete(self._call(message))

    async def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        await self.socket.send_str(json.dumps(message))
        while True:
            heard = json.loads(await asyncio.wait_for(self.socket.receive_str(), PATIENCE_S))
            if heard.get("id") == message["id"]:
                assert "error" not in heard, f"{message['method']}: {heard['error']}"
                result: dict[str, Any] = heard["result"]
                return result
            self.events.append(heard)

    def open(self, url: str = "") -> "Tab":
        """A tab of its own that shares no storage with any other."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        if url:
            tab.go(url)
        return tab

    def close(self) -> None:
        try:
            self.call("Browser.close")
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()  # nothing, if it has ended
            self.process.wait()
            self.loop.run_until_complete(self.http.close())
            self.loop.close()


class Tab:
    """One page, as somebody in front of it sees and touches it."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.browser, self.session, self.context = browser, session, context

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def go(self, url: str) -> None:
        told = self.call("Page.navigate", url=url)
        assert "errorText" not in told, f"{url}: {told['errorText']}"
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of an expression, evaluated in the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, f"{expression}: {told['exceptionDetails']}"
        return told["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until the expression is true."""
        end_s = time.monotonic() + PATIENCE_S
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < end_s, f"never true: {expression}\n{self.text()}\n{self.complaints()}"
            time.sleep(0.02)

    def text(self, selector: str = "body") -> str:
        """What can be read there; nothing if there is no such thing or it is hidden."""
        seen = "(one) => one?.checkVisibility() ? one.innerText : ''"
        return str(self.run(f"({seen})(document.querySelector({json.dumps(selector)}))"))

    def texts(self, selector: str) -> list[str]:
        found = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)")
        assert isinstance(found, list)
        return found

    def click(self, selector: str) -> None:
        """With the mouse, in its middle, where it must be seen and not covered."""
        where = json.dumps(selector)
        self.run(f"document.querySelector({where}).scrollIntoView({{block: 'nearest'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({where}).getBoundingClientRect())"
        )
        on_top = f"document.querySelector({where}).contains(document.elementFromPoint({box[0]}, {box[1]}))"
        assert self.run(on_top), f"{selector} cannot be clicked: it is hidden or covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code, number, text = KEYS[key]
        same = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **same)
        self.call("Input.dispatchKeyEvent", type="keyUp", **same)

    def fill(self, selector: str, text: str) -> None:
        """Replace what stands in a field."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.type(text)

    def look(self, *, width: int = 0, height: int = 0, dark: bool | None = None) -> None:
        """Change the size of the window or the colours people prefer."""
        if width:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            self.call("Emulation.setDeviceMetricsOverride", **size)
        if dark is not None:
            wish = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            self.call("Emulation.setEmulatedMedia", features=[wish])

    def shot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def names(self, *roles: str) -> list[str]:
        """What a screen reader calls each control of these roles."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [node["name"]["value"] for node in nodes if not node["ignored"] and node["role"]["value"] in roles]

    def requests(self) -> list[str]:
        """The URL of everything that the page has asked for."""
        self.run("1")
        own = [one for one in self.browser.events if one.get("sessionId") == self.session]
        return [one["params"]["request"]["url"] for one in own if one["method"] == "Network.requestWillBeSent"]

    def complaints(self, network: bool = True) -> list[str]:
        """Errors and warnings on the console so far: exceptions, refused resources, failed requests (if asked for)."""
        self.run("1")  # whatever happened before this has been heard after it
        told = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                told.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                told.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded":
                entry = params["entry"]
                if entry["level"] in ("error", "warning") and (network or entry["source"] != "network"):
                    told.append(f"{entry['source']}: {entry['text']}")
        return told

    def close(self) -> None:
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)
        self.browser.events = [one for one in self.browser.events if one.get("sessionId") != self.session]
