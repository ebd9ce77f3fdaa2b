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


def test_kernels_in_detail():
    from sppo.kernels.triton.cross_entropy import _cross_entropy_kernel
    from sppo.kernels.triton.merge import _merge_kernel

    merged = pointer_use(_merge_kernel)
    assert pointers_of(merged.writes) == {"o_ptr", "lse_ptr"}
    assert pointers_of(merged.reads) == {"o_ptr", "lse_ptr", "part_ptr", "part_lse_ptr"}
    loss = pointer_use(_cross_entropy_kernel)  # by functions that it calls
    assert pointers_of(loss.writes) == {"logits_ptr", "losses_ptr"}
    assert pointers_of(loss.reads) == {"logits_ptr", "labels_ptr", "scale_ptr"}


def pointers_of(names):
    return {name for name in names if name.endswith("_ptr")}
