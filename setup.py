"""The optional native part of the installation; pyproject.toml describes the package."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NATIVE_FILES = ["CMakeLists.txt", *(f"csrc/{p.name}" for p in sorted((ROOT / "csrc").glob("*.*")))]
NATIVE_PLACE = "sppo/kernels/_native"


class BuildWithNative(build_py):
    """Copies the Python files, then builds the native library beside them where that works."""

    def run(self) -> None:
        """An editable installation runs from the sources, so there the library joins those."""
        super().run()
        top = ROOT if self.editable_mode else Path(self.build_lib)
        runpy.run_path(str(ROOT / "csrc/build_native.py"))["build_native"](top / NATIVE_PLACE)

    def get_source_files(self) -> list[str]:
        """What a source distribution needs to build the library."""
        return [*super().get_source_files(), *NATIVE_FILES]


class PlatformDistribution(Distribution):
    """A wheel that may hold a library is good for this platform only, and is named so."""

    def has_ext_modules(self) -> bool:
        """Yes, although no setuptools extension module is listed."""
        return True


setup(cmdclass={"build_py": BuildWithNative}, distclass=PlatformDistribution)
