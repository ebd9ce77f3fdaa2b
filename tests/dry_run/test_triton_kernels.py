"""Reads and writes of Triton kernels, found in their sources."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

triton_package = pytest.importorskip("sppo.kernels.triton")
launch = pytest.importorskip("sppo.kernels.triton.launch")

from tests.dry_run.triton_kernels import pointer_use  # noqa: E402


def kernels():
    for info in pkgutil.iter_modules(triton_package.__path__):
        module = importlib.import_module(f"sppo.kernels.triton.{info.name}")
        for name, value in vars(module).items():
            named = name.endswith("_kernel") and hasattr(value, "fn")
            if named and value.fn.__module__ == module.__name__:
                yield value


@pytest.mark.parametrize("kernel", [*kernels()], ids=lambda kernel: kernel.fn.__name__)
def test_every_pointer_is_read_or_written(kernel):
    use = pointer_use(kernel)
    pointers = {name for name in kernel.arg_names if name.endswith("_ptr")}
    assert pointers <= use.reads | use.writes
    assert pointers & use.writes
