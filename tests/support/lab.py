"""JupyterLab in a headless browser: a server of our own and one notebook tab."""

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.kernel import notebook_env

if TYPE_CHECKING:  # playwright is an optional extra
    from playwright.sync_api import Locator, Page

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_BROWSER_ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_SERVER_ARGS = [
    "--no-browser",
    "--allow-root",
    "--ip=127.0.0.1",
    "--port=0",
    "--LabApp.expose_app_in_browser=True",  # window.jupyterapp
    "--ServerApp.terminals_enabled=False",
]
_SETTINGS = {
    "apputils-extension/notification": {  # no question about news over the first notebook
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the DOM
}
DIRS = (
    "IPYTHONDIR",
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
)
_START_TIMEOUT_S = 60.0
_REQUEST_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.05


def chromium_path() -> str | None:
    """The installed Chromium or Chrome, or None."""
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def browser_skip_reason() -> str | None:
    """Why browser tests cannot run here, or None where they can."""
    missing = [m for m in ("playwright", "jupyterlab") if importlib.util.find_spec(m) is None]
    if chromium_path() is None:
        missing.append(f"a browser ({', '.join(_BROWSERS)})")
    return f"browser tests need {' and '.join(missing)}" if missing else None


class Lab:
    """A JupyterLab server on loopback, with its own token, settings and folders.

    As a context manager it serves `root` and ends with every kernel it started.
    """

    def __init__(self, root: Path, env: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.token = secrets.token_hex(16)
        self.url = ""
        self._home = tempfile.TemporaryDirectory(prefix="nbdist-lab-")
        home = Path(self._home.name)
        self._runtime_dir = home / "jupyter_runtime_dir"
        self._log_path = home / "lab.log"
        bin_dir = str(Path(sys.executable).parent)
        variables = {name: str(home / name.lower()) for name in (*DIRS, "npm_config_cache")}
        variables["PATH"] = os.pathsep.join([bin_dir, os.environ.get("PATH", os.defpath)])
        self._env = notebook_env({"NBDIST_PRELOAD": "1"} | variables | dict(env or {}))
        self._process: subprocess.Popen[bytes] | None = None
        _write_settings(home / "jupyterlab_settings_dir")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The server; its kernels are its children."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server and its kernels wrote to stdout and stderr."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def api(self, path: str, method: str = "GET") -> Any:
        """What the server's REST interface answers, for example to `/api/kernels`."""
        request = urllib.request.Request(
            f"{self.url}{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S) as response:
            body = response.read()
        return json.loads(body) if body else None

    def end_kernels(self) -> None:
        """Shut down every kernel."""
        for kernel in self.api("/api/kernels"):
            self.api(f"/api/kernels/{kernel['id']}", "DELETE")

    def stop(self) -> None:
        """Shut down every kernel, then the server; harmless when it has ended."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError, ValueError):  # a server in trouble ends below
                self.end_kernels()
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_STOP_TIMEOUT_S)
        self._home.cleanup()

    def _start(self) -> None:
        args = [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.root}"]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *_SERVER_ARGS, *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self.root,
                start_new_session=True,
            )
        self._until(self._is_serving, _START_TIMEOUT_S)

    def _is_serving(self) -> bool:
        """Whether the server answers; it writes the port it took into its runtime folder."""
        info = self._runtime_dir / f"jpserver-{self.pid}.json"
        try:
            self.url = f"http://127.0.0.1:{json.loads(info.read_bytes())['port']}"
            self.api("/api/status")
        except (OSError, ValueError):  # not written yet, half written, not listening yet
            return False
        return True

    def _until(self, is_true: Callable[[], bool], timeout_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if self._process.poll() is not None or time.monotonic() > deadline:
                state = f"exit status {self._process.returncode}"
                raise TimeoutError(f"JupyterLab did not start ({state}). Its log:\n{self.log}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)


@contextlib.contextmanager
def browser_page(width: int = 1280, height: int = 900) -> "Iterator[Page]":
    """A page of a fresh headless browser. Keep it to one test: it leaves an event loop running."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="nbdist-browser-") as home, sync_playwright() as web:
        browser = web.chromium.launch(
            executable_path=chromium_path(), args=_BROWSER_ARGS, env=dict(os.environ, HOME=home)
        )
        with contextlib.closing(browser):
            yield browser.new_page(viewport={"width": width, "height": height})


class LabNotebook:
    """One notebook tab, driven through JupyterLab's own commands. Cells count from 0."""

    def __init__(self, page: "Page", lab: Lab, path: str, timeout_s: float = 60.0) -> None:
        """Open `path`, relative to the server's root, and wait until its kernel is idle.

        The file must name its kernel in `metadata.kernelspec`, or JupyterLab asks for one.
        """
        self.page = page
        timeout_ms = timeout_s * 1000
        url = f"{lab.url}/lab/tree/{path}?token={lab.token}&reset"
        page.goto(url, wait_until="domcontentloaded", timeout=timeout_ms)
        page.wait_for_selector("#jupyterlab-splash", state="detached", timeout=timeout_ms)
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=timeout_ms)
        self.wait_idle(timeout_s)

    def cell(self, index: int) -> "Locator":
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> "Locator":
        """The element that holds the cell's outputs, widgets too."""
        return self.cell(index).locator(".jp-OutputArea.jp-Cell-outputArea")

    def output_text(self, index: int) -> str:
        """The cell's outputs as a reader sees them now."""
        return self.output(index).inner_text()

    def prompt(self, index: int) -> str:
        """`[ ]:` not run, `[*]:` queued or running, `[3]:` done."""
        return self.cell(index).locator(".jp-InputPrompt").first.inner_text().strip()

    def run_cell(self, index: int, timeout_s: float = 60.0, *, wait: bool = True) -> None:
        """Run a cell as Ctrl+Enter does; with wait=False see `wait_done` and `wait_text`."""
        self.page.evaluate(_RUN_CELL, index)
        if wait:
            self.wait_done(index, timeout_s)

    def wait_done(self, index: int, timeout_s: float = 60.0) -> None:
        """Wait until a cell sent by `run_cell` has ended, well or not, and its output is drawn."""
        self._wait(_IS_CELL_DONE, index, timeout_s, f"the end of cell {index}", index)
        self.page.evaluate(_DRAWN)

    def wait_text(self, index: int, text: str, timeout_s: float = 30.0) -> None:
        """Wait until `text` stands in a cell's outputs, ended or not."""
        self._wait(_HAS_TEXT, [index, text], timeout_s, f"{text!r} in cell {index}", index)

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until the kernel is connected and has nothing to do."""
        self._wait(_IS_IDLE, None, timeout_s, "an idle kernel")

    def interrupt(self) -> None:
        self.command("notebook:interrupt-kernel")

    def restart(self, timeout_s: float = 60.0) -> None:
        """Restart the kernel through the command and its question, and wait until it is idle."""
        self.page.evaluate(_RESTART)
        self.page.locator(".jp-Dialog .jp-mod-accept").click(timeout=timeout_s * 1000)
        self._wait("() => window.nbdistRestarted === true", None, timeout_s, "the kernel's restart")
        self.wait_idle(timeout_s)

    def command(self, name: str) -> None:
        """Give one of JupyterLab's commands, such as `docmanager:save`, and wait for its end."""
        self.page.evaluate("name => window.jupyterapp.commands.execute(name)", name)

    def screenshot(self, path: Path) -> None:
        self.page.screenshot(path=path)

    def _wait(
        self, script: str, arg: object, timeout_s: float, waiting_for: str, index: int | None = None
    ) -> None:
        from playwright.sync_api import TimeoutError as PageTimeoutError

        try:
            self.page.wait_for_function(script, arg=arg, timeout=timeout_s * 1000)
        except PageTimeoutError as error:
            seen = self.page.locator(".jp-Notebook") if index is None else self.cell(index)
            shown = [*self.page.locator(".jp-Dialog").all_inner_texts(), *seen.all_inner_texts()]
            raise TimeoutError(
                f"The browser did not reach {waiting_for} in {timeout_s:g} s. It shows:\n"
                + "\n".join(shown)
            ) from error


def write_notebook(path: Path, *sources: str, printed: Sequence[str] = ()) -> None:
    """A notebook of these cells, run where `printed` has what each has shown."""
    # Without a kernel of its own JupyterLab would ask which one to take.
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    shown = [[{"output_type": "stream", "name": "stdout", "text": t}] if t else [] for t in printed]
    cells = [
        {
            "cell_type": "code", "id": f"cell-{number}", "metadata": {}, "source": source,
            "execution_count": 1 if printed else None, "outputs": shown[number] if shown else [],
        }
        for number, source in enumerate(sources)
    ]  # fmt: skip
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook))


def _write_settings(folder: Path) -> None:
    for name, value in _SETTINGS.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))


# What is waited for must be no async function: playwright takes its promise itself for true.
# The promise of a run ends with the cell, so it is kept, not awaited. A run that fails before the
# kernel sees the cell ends too: the test then misses its output.
_RUN_CELL = """index => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    notebook.activeCellIndex = index;
    notebook.deselectAll();
    window.nbdistRuns = window.nbdistRuns || {};
    window.nbdistRuns[index] = false;
    const done = () => { window.nbdistRuns[index] = true; };
    window.jupyterapp.commands.execute('notebook:run-cell').then(done, done);
}"""
_DRAWN = "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r())))"
_IS_CELL_DONE = "index => (window.nbdistRuns || {})[index] === true"
_HAS_TEXT = """([index, text]) => {
    const cell = document.querySelectorAll('.jp-Notebook .jp-Cell')[index];
    return cell.querySelector('.jp-Cell-outputArea').innerText.includes(text);
}"""
_IS_IDLE = """() => {
    const tab = window.jupyterapp && window.jupyterapp.shell.currentWidget;
    if (!tab || !tab.sessionContext || !tab.sessionContext.isReady || !tab.isRevealed) return false;
    const kernel = tab.sessionContext.session && tab.sessionContext.session.kernel;
    return !!kernel && kernel.connectionStatus === 'connected' && kernel.status === 'idle';
}"""
_RESTART = """() => {
    window.nbdistRestarted = false;
    window.jupyterapp.commands.execute('notebook:restart-kernel')
        .then(() => { window.nbdistRestarted = true; });
}"""
