"""Host memory of a plan in words."""

from __future__ import annotations

from sppo.units import format_bytes


def host_memory_text(device_bytes: int, *, node_bytes: int) -> str:
    """Return the peak host memory of the device that uses most of it, and of a node, in words."""
    return (
        f"host memory: {format_bytes(device_bytes)} for the device that uses most, at most "
        f"{format_bytes(node_bytes)} for a node"
    )
