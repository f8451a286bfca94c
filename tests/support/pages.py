"""What a live picture's HTML has in it, read back with plain Python."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from html.parser import HTMLParser
from typing import Any

from nbdist.core.view import View

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
        (found,) = (attrs for name, attrs in self.tags if name == tag)
        return found


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
        head[name] = [int.from_bytes(bytes(own), "little") for own in numbers] or [0] * length
        at += planes * length
    assert at == len(raw)
    return head
