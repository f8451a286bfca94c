"""A live picture in a sandboxed frame, below a cell or in a page."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from nbdist.core.view import View

if TYPE_CHECKING:  # playwright is an optional extra
    from playwright.sync_api import Frame, Page

DEADLINE_MS = 20_000
P = TypeVar("P", bound="LivePicture")


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

    @property
    def seen_ns(self) -> tuple[float, float]:
        """From where to where the picture shows."""
        begin, end = self.value("[from, to]")
        return begin, end

    def point_at(self, ns: float, height: str) -> None:
        """Put the pointer at a time and a height (a script), once nothing moves any more."""
        x, y = self.value(f"[xOf({ns}), {height}]")
        self.frame.locator("#canvas").hover(position={"x": x, "y": y}, timeout=DEADLINE_MS)

    def reset(self) -> None:
        """Show all, without focus on anything."""
        self.frame.locator("#all").click()
        self.page.mouse.move(5, 5)


@contextlib.contextmanager
def opened(kind: type[P], page: "Page", view: View) -> Iterator[P]:
    """A view's live picture in a page of its own, in the browser of another page."""
    browser = page.context.browser
    assert browser is not None
    with contextlib.closing(browser.new_page()) as new_page:
        new_page.set_content(view.html)
        yield kind(new_page)
