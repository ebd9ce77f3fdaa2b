"""Memory pool: compiled once, when first needed, wherever that works; else a reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sppo import native_build
from sppo.native_build import built, file_name, find
from tests.tiers import exhaustive

ROOT = Path(__file__).parents[1]
FILES_OF_THE_PACKAGE = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt")


COMPILES = 'while [ "$1" != -o ]; do shift; done; : > "$2"'
"""Body of a compiler that writes an empty library."""


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The package's place of the library and the user's cache, both empty."""
    package, cache = tmp_path / "package", tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(native_build, "PLACE", package)
    return package, cache / "sppo"


def fake_compiler(path: Path, body: str) -> Path:
    """A compiler that writes a line for each call to PATH.calls."""
    path.write_text(f"#!/bin/sh\necho >> '{path}.calls'\n{body}\n")
    path.chmod(0o755)
    return path


def calls(compiler: Path) -> int:
    log = Path(f"{compiler}.calls")
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that works, and the one that is used."""
    fake = fake_compiler(tmp_path / "c++", COMPILES)
    monkeypatch.setenv("CXX", str(fake))
    return fake


def test_it_is_compiled_when_first_needed(places, compiler, capsys):
    assert find() is None
    library = built()
    assert library == places[0] / file_name() == find()
    assert capsys.readouterr().err == "sppo: building the memory pool, once\n"
    assert built() == library
    assert capsys.readouterr().err == ""
    assert calls(compiler) == 1


def test_the_users_cache_takes_it_if_the_package_cannot(places, compiler):
    places[0].write_text("")  # also root cannot write into a file
    assert built() == places[1] / file_name()
    places[1].parent.rename(places[1].parent.with_name("gone"))
    places[1].parent.write_text("")
    reason = str(built())
    assert re.fullmatch("not built: none of .*package, .*sppo can be written", reason)


def test_of_processes_that_start_together_one_compiles(places, tmp_path):
    compiler = fake_compiler(tmp_path / "c++", f"sleep 0.5; {COMPILES}")
    code = (
        "import sys; from pathlib import Path; from sppo import native_build as n\n"
        "n.PLACE = Path(sys.argv[1]); print(n.built())"
    )
    command = [sys.executable, "-c", code, str(places[0])]
    environment = {**os.environ, "CXX": str(compiler)}
    together = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {process.communicate()[0].strip() for process in together}
    assert said == {str(places[0] / file_name())}
    assert calls(compiler) == 1


def test_another_torch_gets_another_library(places, tmp_path, monkeypatch):
    names = set()
    for version in ("2.13.0+cpu", "2.14.0"):
        torch = tmp_path / version / "torch"
        (torch / "include/c10").mkdir(parents=True)
        (torch / "version.py").write_text(f"__version__ = '{version}'\n")
        monkeypatch.setattr(native_build.sys, "path", [str(torch.parent)])
        names.add(file_name())
    assert len(names) == 2
    monkeypatch.setattr(native_build.sys, "path", [])
    monkeypatch.setattr(native_build.sysconfig, "get_path", lambda name: str(tmp_path))
    assert str(built()).startswith("not built: no torch with its headers")


def test_without_a_compiler_it_says_what_to_install(places, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert built() == (
        "not built: no C++ compiler (c++, g++, clang++); install one, e.g. apt install g++"
    )
    assert not places[0].exists()


def test_a_compiler_that_fails_is_quoted_and_called_once(places, tmp_path, monkeypatch):
    body = "echo noise >&2; echo 'fatal error: no stdio.h' >&2; exit 1"
    broken = fake_compiler(tmp_path / "broken c++", body)
    monkeypatch.setenv("CXX", f"'{broken}' -m64")
    reason = f"not built: {broken} failed: fatal error: no stdio.h"
    assert built() == reason
    assert built() == f"{reason} (sppo doctor tries again)"
    assert calls(broken) == 1
    native_build.forget_failure()
    assert built() == reason
    assert calls(broken) == 2


def test_a_variable_that_is_no_command_is_said(places, monkeypatch):
    monkeypatch.setenv("CXX", "gcc '")
    assert built() == (
        "not built: CXX=gcc ' is no command (No closing quotation); mend or unset it"
    )


def test_a_failure_without_space_to_note_it_is_tried_again(places, tmp_path, monkeypatch):
    broken = fake_compiler(tmp_path / "c++", "echo 'error: no space' >&2; exit 1")
    monkeypatch.setenv("CXX", str(broken))

    def full(path, text):
        path.touch()
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", full)
    for _ in range(2):
        assert built() == f"not built: {broken} failed: error: no space"
    assert calls(broken) == 2


@pytest.mark.parametrize("compiler", [True, *exhaustive(False)])
def test_an_installation_brings_the_library_or_its_sources(tmp_path, compiler):
    """The step of setup.py that pip runs, on a copy, for a package outside a clone."""
    for name in (*FILES_OF_THE_PACKAGE, "csrc", "sppo"):
        source, target = ROOT / name, tmp_path / "src" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "_native"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
    if compiler and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(tmp_path / "build")],
        cwd=tmp_path / "src",
        env={**environment, "PATH": os.environ["PATH"] if compiler else ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [lib] = (tmp_path / "build").glob("lib*")
    place = lib / "sppo/kernels/_native"
    assert (place / file_name()).is_file() == compiler
    assert ("no C++ compiler" in done.stdout) == (not compiler)
    shutil.rmtree(tmp_path / "src")
    code = "from sppo.native_build import file_name; print(file_name())"
    environment = {**environment, "PYTHONPATH": str(lib)}
    known = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=lib, capture_output=True, text=True
    )
    assert known.stdout.strip() == file_name(), known.stderr
