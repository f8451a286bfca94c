"""What a live picture's HTML has in it, read back with plain Python."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import struct
from html.parser import HTMLParser
from typing import Any

from matplotlib.image import imread

from nbdist.core.view import View
from nbdist.recording.view.png import WIDTH

# Names that no page may take for anything else.
MARKUP = "</script><script>alert(1)</script><!-- \"'&"
STRANGE = (MARKUP, "ядро $x_1$ 核函数 \U0001f600", "n" * 5000, "two\nlines", "")


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def one(self, tag: str) -> dict[str, str]:
        """The attributes of the only tag of this name."""
        (attributes,) = (attrs for name, attrs in self.tags if name == tag)
        return attributes


def check_drawn(view: View, most_bytes: float) -> dict[str, Any]:
    """It has an image of the usual width with a frame over it, and is small; what is packed."""
    assert imread(io.BytesIO(view.png)).shape[1] == WIDTH
    tags = [tag for tag, _ in Tags(view.html).tags if tag in {"script", "iframe", "img"}]
    assert tags == ["img", "iframe"]
    assert size_of(view) < most_bytes
    return data_of(view)


class ClosedTags(Tags):
    """The same, checked that each is closed in its place."""

    def __init__(self, text: str) -> None:
        self.open: list[str] = []
        super().__init__(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def size_of(view: View) -> int:
    """Bytes of the bundle as a notebook stores it."""
    return len(json.dumps(view._repr_mimebundle_()))


def data_of(view: View) -> dict[str, Any]:
    """What the page has packed, its columns as lists of whole numbers."""
    inner = Tags(view.html).one("iframe")["srcdoc"]
    (text,) = re.findall(r'id="data">(.*?)</script>', inner)
    raw = gzip.decompress(base64.b64decode(text))
    (size,) = struct.unpack_from("<I", raw)
    head: dict[str, Any] = json.loads(raw[4 : 4 + size])
    at = 4 + size
    for name, planes, length in head["columns"]:
        octets = [raw[at + plane * length : at + (plane + 1) * length] for plane in range(planes)]
        numbers = zip(*octets, strict=True)
        # A column of zeros has no planes.
        head[name] = [int.from_bytes(bytes(column), "little") for column in numbers] or [0] * length
        at += planes * length
    assert at == len(raw)
    return head
