"""Helpers and fixtures that many tests share: token data, run files, the command line."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Waiting threads that spin slow everything down when other programs run on the machine. OpenMP
# reads this variable when torch is imported, so it is set before imports that import torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Commands break lines at it; readline, which pytest imports, exports it behind Python's back.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

import numpy as np
import pytest
import torch
from click.testing import Result
from hypothesis import HealthCheck, settings
from typer.testing import CliRunner

from sppo.config.yaml_file import format_yaml
from sppo.data.tokens import (
    DOCUMENTS_FILE,
    FORMAT_VERSION,
    LOSS_MASK_FILE,
    META_FILE,
    TOKENS_FILE,
    TokenizerDescription,
    TokenMeta,
)
from sppo.native_build import built
from sppo.output_file import write_json
from tests import tiers
from tests.ranks import RankPool
from tests.training.forked_sppo import ForkedSppo
from tests.unpainted import unpainted

if not torch.cuda.is_available():
    # Kernels run under Triton's interpreter. Read when triton is imported, which transformers does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: the time of an example varies on a shared machine. The default tier draws the same
# examples every time, so that a failure is caused by a change; --all draws new ones.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("all", **_PATIENT)
settings.register_profile("default", **_PATIENT, derandomize=True)

# Compiled before the tests: one that needs it first would see the message on stderr.
built()

VOCAB_SIZE = 32
LENGTH = 64
SCREEN_LINES = 25
MANY_MODULES = 20

RUN: dict[str, dict[str, Any]] = {
    "model": {"preset": "tiny-test", "vocab_size": VOCAB_SIZE, "num_layers": 1},
    "data": {"tokens": "tokens", "shuffle": False},
    "sequence": {"length": LENGTH, "num_subsequences": 4, "alignment": 8},
    "optimizer": {"lr": 1e-2},
    "train": {"steps": 4, "dtype": "fp32", "output": "out"},
}
"""Run that takes milliseconds; its paths are relative to the working directory."""


def write_tokens(
    directory: Path,
    *,
    num_tokens: int = 20 * LENGTH + 1,
    vocab_size: int = VOCAB_SIZE,
    documents: Sequence[int] = (),
    seed: int = 0,
) -> Path:
    """Write token data with random but not uniform ids, so that there is something to learn.

    Args:
        directory: Directory to make.
        num_tokens: Total number of tokens.
        vocab_size: Upper bound of the ids, exclusive.
        documents: Starts of the documents after the first.
        seed: Seed of the ids.
    """
    random = np.random.default_rng(seed)
    tokens = (vocab_size * random.random(num_tokens) ** 3).astype("<u2")
    directory.mkdir(parents=True)
    tokens.tofile(directory / TOKENS_FILE)
    np.save(directory / DOCUMENTS_FILE, np.array([0, *documents, num_tokens], dtype=np.int64))
    meta = TokenMeta(
        format_version=FORMAT_VERSION,
        dtype="uint16",
        vocab_size=vocab_size,
        max_id=int(tokens.max()),
        num_tokens=num_tokens,
        num_documents=1 + len(documents),
        tokens_sha256=hashlib.sha256(tokens.tobytes()).hexdigest(),
        tokenizer=TokenizerDescription(name="ids", end_of_document=None),
    )
    write_json(directory / META_FILE, asdict(meta))
    return directory


def write_masked(directory: Path, mask: Sequence[int], **options: Any) -> None:
    """Write token data whose loss mask repeats ``mask``."""
    write_tokens(directory, **options)
    meta = json.loads((directory / META_FILE).read_text())
    counts = np.resize(np.array(mask, dtype=np.uint8), meta["num_tokens"])
    (directory / LOSS_MASK_FILE).write_bytes(counts.tobytes())
    meta["loss_mask_sha256"] = hashlib.sha256(counts.tobytes()).hexdigest()
    (directory / META_FILE).write_text(json.dumps(meta))


def write_run(path: Path, **sections: Any) -> Path:
    """Write a run file: :data:`RUN` updated by the keys of ``sections``."""
    merged = {name: dict(section) for name, section in RUN.items()}
    for name, section in sections.items():
        merged[name] = {**merged.get(name, {}), **section}
    path.write_text(format_yaml(merged))
    return path


def tree(directory: Path) -> dict[str, bytes | str | None]:
    """Return everything below ``directory`` by path: bytes of files, None for directories."""

    def content(path: Path) -> bytes | str | None:
        if path.is_symlink():
            return os.readlink(path)
        return path.read_bytes() if path.is_file() else None

    return {str(p.relative_to(directory)): content(p) for p in sorted(directory.rglob("*"))}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of random trainings, and of the random moments of tests/chaos."""
    parser.addoption("--seed", type=int, default=0, help="of what is drawn at random")
    parser.addoption("--count", type=int, default=10, help="random trainings from this seed on")
    parser.addoption("--case", help="random training to repeat, as a failure shows it")


def pytest_configure(config: pytest.Config) -> None:
    """Set the tier of this session before tests that draw random examples are imported."""
    tiers.default_tier = "not exhaustive" in config.option.markexpr
    settings.load_profile("default" if tiers.default_tier else "all")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude the modules imported so far from garbage collection, which runs trigger often."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Undo gc.freeze, so that the interpreter ends as it does without tests."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _freeze_imports() -> Iterator[None]:
    """Exclude the modules that a test imported from garbage collection, if there are many."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + MANY_MODULES:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _cpu_unless_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tests on the CPU on a machine with a GPU, except tests marked gpu or multigpu."""
    wants = request.node.get_closest_marker("gpu") or request.node.get_closest_marker("multigpu")
    if torch.cuda.is_available() and wants is None:
        monkeypatch.setattr("sppo.training.devices.device.device_kind", lambda run: "cpu")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of processes that a test starts


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with token data in ``tokens`` and a run of four steps in ``run.yaml``."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens")
    write_run(tmp_path / "run.yaml")
    return tmp_path


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[..., Path]:
    """Function that writes ``run.yaml``: see :func:`write_run`."""
    return lambda **sections: write_run(tmp_path / "run.yaml", **sections)


def call(*words: object, paints: bool = False) -> Result:
    """Run ``sppo`` with these words in this process; plots of a run are painted if ``paints``."""
    from sppo.cli.app import app

    with unpainted() if words[:1] == ("train",) and not paints else nullcontext():
        return CliRunner().invoke(app, [str(word) for word in words])


def succeed(*words: object, paints: bool = False) -> str:
    """Return the stdout of a call that must succeed."""
    result = call(*words, paints=paints)
    assert result.exit_code == 0, result.output
    return result.stdout


def refuse(*words: object, code: int = 2) -> str:
    """Return the stderr of a call that must fail with ``code``: one screen without traceback."""
    result = call(*words)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert len(result.output.splitlines()) <= SCREEN_LINES, result.output
    return result.stderr


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that communicate over gloo."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def sppo() -> Iterator[ForkedSppo]:
    """Run the command in forked children, with hooks that break it at an exact moment."""
    command = ForkedSppo()
    yield command
    command.close()
