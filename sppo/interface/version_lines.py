"""Lines of ``sppo --version``: versions of SPPO and packages, native parts; imports no torch."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from sppo.version import __version__

_NATIVE = Path(__file__).parents[1] / "kernels/_native"
_PARTS = {"host library": "sppo_native.so", "memory pool": "sppo_cpu_allocator.so"}
_PACKAGES = ("torch", "triton", "flash-attn", "numpy")


def version_lines() -> tuple[str, ...]:
    """Return lines with the version, then Python and packages, then the native parts."""
    packages = (f"{name} {_version(name)}" for name in _PACKAGES)
    built = [name for name, file in _PARTS.items() if (_NATIVE / file).is_file()]
    missing = [name for name in _PARTS if name not in built]
    parts = f"built: {', '.join(built) or 'nothing'}"
    return (
        f"sppo {__version__}",
        f"Python {platform.python_version()}, {', '.join(packages)}",
        parts + (f"; not built: {', '.join(missing)} (sppo doctor)" if missing else ""),
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
