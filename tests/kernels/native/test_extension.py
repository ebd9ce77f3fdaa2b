"""Native library: built in two ways or not at all; loaded, or refused with a reason."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sppo.kernels.native import extension
from sppo.kernels.native.extension import NativeLibrary, describe, load, native_library
from tests.native_builds import ROOT, build_module, c_compiler, library

CHECK = ROOT / "tests/kernels/host_arena_check.c"


@pytest.fixture
def without_programs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where the package looks for its library: empty."""
    monkeypatch.setattr(extension, "_PLACE", tmp_path / "native")
    return tmp_path / "native"


def only(*programs: str, directory: Path) -> str:
    """A PATH with nothing but these programs."""
    directory.mkdir()
    for name in programs:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"no {name}")
        (directory / name).symlink_to(found)
    return str(directory)


def test_both_sides_know_the_same_names():
    build = build_module()
    assert build.LIBRARY_NAME == extension.LIBRARY_NAME
    assert build.REASON_NAME == extension.REASON_NAME
    header = (ROOT / "csrc/host_arena.h").read_text()
    assert f"#define SPPO_INTERFACE_VERSION {extension.INTERFACE_VERSION}\n" in header


def test_cmake_builds_it(place, capfd):
    c_compiler()
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    assert build_module().build_native(place)
    assert "built with CMake" in capfd.readouterr().out
    assert native_library() is not None
    assert describe() == f"native: sppo_native.so, interface {extension.INTERFACE_VERSION}"
    assert native_library() is native_library()


def test_a_compiler_alone_builds_it(place, monkeypatch, capfd, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", only("gcc", "as", "ld", directory=tmp_path / "bin"))
    assert build_module().build_native(place)
    assert "built with a compiler" in capfd.readouterr().out
    assert extension.LIBRARY_NAME in {path.name for path in place.iterdir()}
    assert native_library() is not None


def test_without_a_compiler_python_serves(place, without_programs, capfd):
    place.mkdir()
    (place / extension.LIBRARY_NAME).write_text("of an earlier build")
    assert not build_module().build_native(place)
    reason = "no cmake; no compiler (cc, gcc, clang)"
    said = f"sppo: no sppo_native.so, the program does without: {reason}\n"
    assert capfd.readouterr().out.startswith(said)
    assert not (place / extension.LIBRARY_NAME).exists()
    assert native_library() is None
    assert describe() == f"python fallback: not built: {reason}"


def test_a_compiler_that_fails_is_quoted(place, monkeypatch, capfd, tmp_path):
    broken = tmp_path / "broken cc"
    broken.write_text("#!/bin/sh\necho noise >&2\necho 'fatal error: no stdio.h' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("CC", f"'{broken}' -m64")
    monkeypatch.setattr("shutil.which", lambda name: name if name == str(broken) else None)
    assert not build_module().build_native(place)
    assert describe().endswith(f"{broken} failed: fatal error: no stdio.h")


def test_a_place_that_cannot_be_written_stops_nothing(tmp_path, capfd):
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert not build_module().build_native(occupied / "native")
    assert "the program does without" in capfd.readouterr().out


FILES_OF_THE_PACKAGE = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


def test_an_installation_without_a_compiler_succeeds(tmp_path, without_programs):
    """The step of setup.py that pip runs, on a copy and without any program to be found."""
    for name in (*FILES_OF_THE_PACKAGE, "CMakeLists.txt", "csrc", "sppo"):
        source, target = ROOT / name, tmp_path / "src" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "_native"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(tmp_path / "build")],
        cwd=tmp_path / "src",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no compiler" in done.stdout
    [lib] = (tmp_path / "build").glob("lib*")
    assert (lib / "sppo/kernels/native/extension.py").exists()
    assert "no compiler" in (lib / "sppo/kernels/_native/not_built.txt").read_text()
    assert not (tmp_path / "src/sppo/kernels/_native").exists()


def test_an_installation_that_never_built_says_so(place):
    assert native_library() is None
    assert describe().startswith(f"python fallback: {place}")
    assert "pip install builds it" in describe()


def test_what_is_not_a_library_is_refused(place):
    place.mkdir()
    (place / extension.LIBRARY_NAME).write_text("not a library")
    assert native_library() is None
    assert "does not load" in describe()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int other;", "not SPPO's library"),
        (
            "int sppo_interface_version(void) { return 999; } int sppo_arena_reserve;"
            " int sppo_arena_touch; int sppo_arena_release;",
            "the library has interface 999, this package needs",
        ),
    ],
)
def test_another_library_is_refused(tmp_path, source, reason):
    (tmp_path / "other.c").write_text(source)
    command = [c_compiler(), "-shared", "-fPIC", "-o", tmp_path / extension.LIBRARY_NAME]
    subprocess.run([*command, tmp_path / "other.c"], check=True)
    loaded = load(tmp_path)
    assert isinstance(loaded, str)
    assert reason in loaded


def test_errors_carry_the_systems_number():
    native = library()
    assert isinstance(native, NativeLibrary)
    for size, node, number in ((0, None, errno.EINVAL), (1 << 60, None, errno.ENOMEM)):
        with pytest.raises(OSError, match=r"Errno") as caught:
            native.reserve(size, huge_pages=False, numa_node=node)
        assert caught.value.errno == number
    with pytest.raises(OSError, match=r"Errno") as caught:
        native.reserve(4096, huge_pages=False, numa_node=1 << 20)
    assert caught.value.errno in (errno.EINVAL, errno.ENOSYS)


def test_the_sources_pass_the_sanitizers(tmp_path):
    """Strict warnings are errors, and addresses, leaks and undefined behaviour are watched."""
    program = tmp_path / "check"
    sources = [CHECK, ROOT / "csrc/host_arena.c"]
    warn = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    sanitize = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [
        c_compiler(),
        "-std=c11",
        "-pthread",
        *warn,
        *sanitize,
        f"-I{ROOT / 'csrc'}",
        "-o",
        program,
    ]
    built = subprocess.run([*command, *sources], capture_output=True, text=True)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("the compiler has no sanitizer libraries")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_cmake_offers_the_sanitizers(tmp_path):
    c_compiler()
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    configure = [cmake, "-S", ROOT, "-B", tmp_path, "-DSPPO_SANITIZE=undefined"]
    subprocess.run(configure, check=True, capture_output=True)
    build = [cmake, "--build", tmp_path, "--target", "host_arena_check"]
    subprocess.run(build, check=True, capture_output=True)
    done = subprocess.run([tmp_path / "host_arena_check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_loading_the_package_loads_no_library():
    code = "import sppo.kernels.native.extension as e; print(e.load.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "0\n", done.stderr
