"""A live picture in a sandboxed frame, below a cell or in a page."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # playwright is an optional extra
    from playwright.sync_api import Frame, Page

DEADLINE_MS = 20_000


class LivePicture:
    """The frame of the first one in a page."""

    def __init__(self, page: "Page") -> None:
        """Wait until it is painted."""
        self.page = page
        page.wait_for_selector("iframe[srcdoc]", timeout=DEADLINE_MS)
        handle = page.query_selector("iframe[srcdoc]")
        assert handle is not None
        frame = handle.content_frame()
        assert frame is not None
        self.frame: Frame = frame
        self.frame.wait_for_selector("#frame[data-painted-ms]", timeout=DEADLINE_MS)

    def value(self, script: str) -> Any:
        """What a script of the frame gives, after the next picture."""
        self.frame.evaluate("() => new Promise(r => requestAnimationFrame(() => setTimeout(r)))")
        return self.frame.evaluate(script)

    @property
    def tip(self) -> list[str]:
        """The tooltip's lines; empty where there is none."""
        text: str = self.value("tip.hidden ? '' : tip.textContent")
        return text.splitlines()

    def reset(self) -> None:
        """Show all, without focus on anything."""
        self.frame.locator("#all").click()
        self.page.mouse.move(5, 5)
