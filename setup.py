"""Installation of SPPO: the package, its command, its extras, and the optional native part."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NATIVE_FILES = ["CMakeLists.txt", *(f"csrc/{p.name}" for p in sorted((ROOT / "csrc").glob("*.*")))]
NATIVE_PLACE = "sppo/kernels/_native"
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "sppo/version.py").read_text())
assert VERSION is not None, "sppo/version.py names the version"

DEV = [
    "hypothesis>=6.100",
    "import-linter>=2.16",
    "mypy>=1.11",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
    "triton>=3.6; sys_platform == 'linux'",  # its interpreter runs the kernels' tests on a CPU
    "types-PyYAML",
]
HF = ["tokenizers>=0.19"]
TRACK = ["tensorboard>=2.16"]


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


setup(
    name="sppo",
    version=VERSION.group(1),
    description="Trains transformers on sequences that do not fit, cut into subsequences",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["sppo", "sppo.*"]),
    install_requires=[
        "matplotlib>=3.8",
        "numpy>=1.26",
        "psutil>=5.9",
        "pydantic>=2.7",
        "pyyaml>=6",
        "rich>=13",
        "safetensors>=0.4.3",
        "scipy>=1.11",
        "torch>=2.11",
        "typer>=0.12",
    ],
    extras_require={
        "hf": HF,
        "track": TRACK,
        "gpu": ["triton>=3.6", "flash-attn>=2.7", "cupy-cuda13x", "nvidia-ml-py"],
        "dev": [*DEV, *HF, *TRACK, "transformers>=4.51"],
    },
    entry_points={"console_scripts": ["sppo = sppo.__main__:main"]},
    cmdclass={"build_py": BuildWithNative},
    distclass=PlatformDistribution,
)
