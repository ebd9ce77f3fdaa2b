"""Installation of SPPO: the package, its command, its extras, and the optional native part."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "sppo/__init__.py").read_text())
assert VERSION is not None, "sppo/__init__.py names the version"

DEV = [
    "hypothesis>=6.100",
    "import-linter>=2.1",
    "mypy>=1.11",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "ruff>=0.6",
    "types-PyYAML",
]
HF = ["tokenizers>=0.19"]
TRACK = ["tensorboard>=2.16"]

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
        "gpu": ["triton>=3.2", "flash-attn>=2.6", "cupy-cuda13x", "nvidia-ml-py"],
        "dev": [*DEV, *HF, *TRACK, "transformers>=4.51"],
    },
    entry_points={"console_scripts": ["sppo = sppo.cli.app:main"]},
)
