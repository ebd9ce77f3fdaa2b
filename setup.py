"""The native part of the installation; pyproject.toml describes the package."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NATIVE_FILES = ["CMakeLists.txt", *(f"csrc/{p.name}" for p in sorted((ROOT / "csrc").glob("*.*")))]
NATIVE_PLACE = "sppo/kernels/_native"


class BuildWithNative(build_py):
    """Copies the Python files, then compiles the native libraries where that works already."""

    def run(self) -> None:
        """An editable installation runs from the sources; any other brings the C sources along."""
        super().run()
        place = (ROOT if self.editable_mode else Path(self.build_lib)) / NATIVE_PLACE
        if not self.editable_mode:
            shutil.copytree(ROOT / "csrc", place / "csrc", dirs_exist_ok=True)
        runpy.run_path(str(ROOT / "sppo/native_build.py"))["build_native"](place)

    def get_source_files(self) -> list[str]:
        """What a source distribution needs to build the libraries."""
        return [*super().get_source_files(), *NATIVE_FILES]


class PlatformDistribution(Distribution):
    """A wheel that may hold a library is good for this platform only, and is named so."""

    def has_ext_modules(self) -> bool:
        """Yes, although no setuptools extension module is listed."""
        return True


setup(cmdclass={"build_py": BuildWithNative}, distclass=PlatformDistribution)
