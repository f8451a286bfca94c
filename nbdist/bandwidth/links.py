"""Capacities of links: one direction of one device's link, in bytes per second.

Bus bandwidth (bandwidth/results.py) is what one rank sends, so it is compared with one direction.
Data sheets of NVLink, and many tables of PCIe, give the sum of both.
"""

from __future__ import annotations

from dataclasses import dataclass

_GB = 1e9
_GBIT = 1e9 / 8
# Per transfer each lane carries one bit; 128 of 130 (PCIe 3 to 5) are data, and in PCIe 6 236 of
# the 256 bytes of a flit are packets.
_OF_130 = 128 / 130
_OF_FLIT = 236 / 256


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link.

    Attributes:
        found: Where it is found, and what makes the number.
        bytes_per_s: One direction, before the overhead of packets and protocols except where
            `found` says otherwise.
    """

    name: str
    found: str
    bytes_per_s: float


# Sources. NVLink: links times speed of one, nvidia.com/en-us/data-center/nvlink and the
# architecture white papers of A100 (12 x 25 GB/s), H100 (18 x 25) and Blackwell (18 x 50), each
# per direction. PCIe: transfer rates and encodings of pcisig.com/specifications. InfiniBand: data
# rate of a 4x port, infinibandta.org/infiniband-roadmap. Ethernet: IEEE 802.3, the rate in a
# name. EFA: aws.amazon.com/ec2/instance-types/p4 (4 x 100 Gb/s) and p5 (32 x 100).
LINKS = (
    Link("NVLink 5", "B200: 18 links x 50 GB/s", 18 * 50 * _GB),
    Link("NVLink 4", "H100, H200: 18 links x 25 GB/s", 18 * 25 * _GB),
    Link("NVLink 3", "A100: 12 links x 25 GB/s", 12 * 25 * _GB),
    Link("PCIe 6 x16", "16 lanes x 64 GT/s, 236 of 256 bytes", 16 * 64 * _GBIT * _OF_FLIT),
    Link("PCIe 5 x16", "16 lanes x 32 GT/s, 128 of 130 bits", 16 * 32 * _GBIT * _OF_130),
    Link("PCIe 4 x16", "16 lanes x 16 GT/s, 128 of 130 bits", 16 * 16 * _GBIT * _OF_130),
    Link("PCIe 3 x16", "16 lanes x 8 GT/s, 128 of 130 bits", 16 * 8 * _GBIT * _OF_130),
    Link("InfiniBand XDR", "4 lanes, 800 Gb/s", 800 * _GBIT),
    Link("InfiniBand NDR", "4 lanes, 400 Gb/s", 400 * _GBIT),
    Link("InfiniBand HDR", "4 lanes, 200 Gb/s", 200 * _GBIT),
    Link("EFA, p5", "8 GPUs share 3200 Gb/s", 3200 * _GBIT / 8),
    Link("EFA, p4d", "8 GPUs share 400 Gb/s", 400 * _GBIT / 8),
    Link("100 Gb Ethernet", "one port", 100 * _GBIT),
    Link("25 Gb Ethernet", "one port", 25 * _GBIT),
    Link("10 Gb Ethernet", "one port", 10 * _GBIT),
    Link("1 Gb Ethernet", "one port", 1 * _GBIT),
)


def around(bytes_per_s: float) -> tuple[Link | None, Link | None]:
    """The fastest link that is not faster than this, and the slowest that is."""
    below = [link for link in LINKS if link.bytes_per_s <= bytes_per_s]
    above = [link for link in LINKS if link.bytes_per_s > bytes_per_s]
    return (
        max(below, key=lambda link: link.bytes_per_s, default=None),
        min(above, key=lambda link: link.bytes_per_s, default=None),
    )
