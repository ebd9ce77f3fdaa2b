"""Lines of ``sppo --version``: versions of SPPO and packages, native parts; imports no torch."""

from __future__ import annotations

import importlib.metadata
import platform

from sppo.native_build import LIBRARIES, find
from sppo.version import __version__

_PACKAGES = ("torch", "triton", "flash-attn", "numpy")


def version_lines() -> tuple[str, ...]:
    """Return lines with the version, then Python and packages, then the native parts."""
    packages = (f"{name} {_version(name)}" for name in _PACKAGES)
    built = [library.title for library in LIBRARIES if find(library) is not None]
    missing = [library.title for library in LIBRARIES if library.title not in built]
    parts = f"built: {', '.join(built) or 'nothing'}"
    return (
        f"sppo {__version__}",
        f"Python {platform.python_version()}, {', '.join(packages)}",
        parts + (f"; built when first used: {', '.join(missing)}" if missing else ""),
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
