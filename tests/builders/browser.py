"""A real browser, driven over its debugging pipe: no package, no port, no waiting by the clock."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]


class Tab:
    """One page. `evaluate` runs a script in it, whatever its own policy allows."""

    def __init__(self, read: int, write: int):
        self.answers, self.write, self.number, self.session = os.fdopen(read, "rb"), write, 0, ""
        self.complaints: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (letter := self.answers.read(1)) != b"\0":
            assert letter, "the browser has ended"
            text += letter
        answer = json.loads(text)
        if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(answer["params"]))
        return answer

    def evaluate(self, script: str) -> Any:
        answer = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Waits in the page, at most 30 seconds, until the script gives something true."""
        self.evaluate(
            f"""new Promise((done, fail) => {{
              const look = () => {{ if ({condition}) {{ clearInterval(timer); done(); }} }};
              const timer = setInterval(look, 20);
              setTimeout(() => fail(new Error("never: " + document.body.innerText)), 30000);
            }})"""
        )

    @contextlib.contextmanager
    def script(self, source: str) -> Iterator[None]:
        """Inside, every page that is opened runs this before anything of its own."""
        added = self.command("Page.addScriptToEvaluateOnNewDocument", source=source)
        try:
            yield
        finally:
            self.command("Page.removeScriptToEvaluateOnNewDocument", **added)

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.command("Page.navigate", url="about:blank")
        self.command("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def press(self, key: str, *, code: int = 0, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def type(self, words: str) -> None:
        self.command("Input.insertText", text=words)

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.command("DOM.getDocument")["root"]["nodeId"]
        node = self.command("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.command("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browsing() -> Iterator[Tab]:
    """The browser reads commands from its descriptor 3 and writes answers to 4."""
    assert BROWSER is not None
    commands, answers = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands[0], answers[1])]  # away from 3 and 4

    def place_ends() -> None:
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BROWSER, *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=place_ends, stderr=subprocess.DEVNULL)
        for end in (*ends, commands[0], answers[1]):
            os.close(end)
        try:
            yield Tab(answers[0], commands[1])
        finally:
            process.kill()
            process.wait()
            os.close(commands[1])
