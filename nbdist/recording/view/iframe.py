"""A live picture as one piece of HTML that needs no network and no kernel.

The picture lies in a frame of its own (`sandbox="allow-scripts"`: it can reach neither the notebook
nor its cookies) right over an image. Front ends that strip frames from what they do not trust
show the image.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import numpy.typing as npt

# What a browser has to unpack: at most so many bytes as base64.
MOST_BYTES = 1_300_000
HERE = "recording/view"
# Longer names are cut in the middle: those of kernels made of templates run to pages.
MOST_NAME = 160


@dataclass(frozen=True, slots=True)
class Live:
    """A page that draws.

    Attributes:
        scripts: Files by their paths in the package: what stands behind viewer.js, in this order.
        title: What the frame shows, for those who cannot see it.
        data: What the scripts read: base64 of `pack`.
    """

    scripts: tuple[str, ...]
    title: str
    data: str


def over(image: bytes, alt: str, live: Live, height_px: int) -> str:
    """The image with the live picture over it, as HTML.

    Args:
        image: PNG, shown where frames are not.
        alt: What it shows, for those who cannot see it.
        live: The page over it.
        height_px: Of the live picture; more where the image is higher.
    """
    # The frame's page is an attribute of this one, so it is escaped as a whole. What users and
    # libraries have named is inside `data`, where nothing can be taken for markup.
    title = html.escape(live.title, quote=True)
    inner = _resource(f"{HERE}/viewer.html").replace("{{TITLE}}", title)
    inner = inner.replace(
        "{{SCRIPT}}", "\n".join(map(_resource, (f"{HERE}/viewer.js", *live.scripts)))
    )
    srcdoc = html.escape(inner.replace("{{DATA}}", live.data), quote=True)
    source = base64.b64encode(image).decode("ascii")
    return (
        f'<div style="position:relative;min-height:{height_px}px">'
        f'<img src="data:image/png;base64,{source}" alt="{html.escape(alt, quote=True)}"'
        ' style="display:block;width:100%;height:auto">'
        f'<iframe sandbox="allow-scripts" title="{title}"'
        ' style="position:absolute;inset:0;width:100%;height:100%;border:0"'
        f' srcdoc="{srcdoc}"></iframe></div>'
    )


def clip(text: str, most: int = MOST_NAME) -> str:
    """The text, or its beginning and end where it is longer than `most`."""
    if len(text) <= most:
        return text
    end = (most - 3) // 2
    return f"{text[: most - 3 - end]}...{text[-end:]}"


def pack(head: Mapping[str, object], columns: Mapping[str, npt.NDArray[np.integer]]) -> bytes:
    """A JSON head with the texts, then the columns; all gzipped, equal for equal data.

    Columns hold numbers of at least 0. viewer.js reads it: head["columns"] says how.
    """
    planes = [_planes(column) for column in columns.values()]
    layout = [
        (title, len(plane), len(column))
        for (title, column), plane in zip(columns.items(), planes, strict=True)
    ]
    text = json.dumps({**head, "columns": layout}, separators=(",", ":")).encode()
    body = b"".join(plane.tobytes() for plane in planes)
    return gzip.compress(struct.pack("<I", len(text)) + text + body, 6, mtime=0)


def _resource(path: str) -> str:
    return files("nbdist").joinpath(path).read_text(encoding="utf-8")


def _planes(column: npt.NDArray[np.integer]) -> npt.NDArray[np.uint8]:
    """The lowest bytes of all numbers, then the second ones, ...: equal bytes stand together.

    As many planes as the largest number needs.
    """
    needed = (int(column.max(initial=0)).bit_length() + 7) // 8
    octets = np.ascontiguousarray(column, "<i8").view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(octets[:, :needed].T)
