"""Native library: loaded, or refused with a reason; its sources under sanitizers."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys

import pytest

from sppo.kernels.native import extension
from sppo.kernels.native.extension import NativeLibrary
from tests.native_builds import ROOT, c_compiler, library

CHECK = ROOT / "tests/kernels/host_arena_check.c"


def test_the_package_knows_the_interface_of_the_sources():
    header = (ROOT / "csrc/host_arena.h").read_text()
    assert f"#define SPPO_INTERFACE_VERSION {extension.INTERFACE_VERSION}\n" in header


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
def test_another_library_is_refused(tmp_path, source, reason, monkeypatch):
    (tmp_path / "other.c").write_text(source)
    other = tmp_path / "other.so"
    command = [c_compiler(), "-shared", "-fPIC", "-o", other]
    subprocess.run([*command, tmp_path / "other.c"], check=True)
    monkeypatch.setattr(extension, "built", lambda library: other)
    loaded = extension.load.__wrapped__()
    assert isinstance(loaded, str)
    assert reason in loaded


def test_what_is_not_a_library_is_refused(tmp_path, monkeypatch):
    (tmp_path / "no_library.so").write_text("not a library")
    monkeypatch.setattr(extension, "built", lambda library: tmp_path / "no_library.so")
    assert "does not load" in extension.load.__wrapped__()


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
