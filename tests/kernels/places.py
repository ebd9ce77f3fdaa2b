"""Back ends and devices of kernel tests, with the reason why one cannot run here."""

import pytest
import torch

from sppo.kernels.attention.choice import CAPABILITIES, AttentionCase, why_not

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU_BACKENDS = ("cpu_flash", "torch_blocks")
CUDA_BACKENDS = [
    name for name, able in CAPABILITIES.items() if "cuda" in able.devices and name != "reference"
]


def on_gpu(*values, id):
    return pytest.param(*values, id=id, marks=[pytest.mark.gpu, NO_GPU])


DEVICES = [pytest.param("cpu", id="cpu"), on_gpu("cuda", id="cuda")]
ATTENTION_PLACES = [
    *(pytest.param((name, "cpu"), id=f"{name}-cpu") for name in CPU_BACKENDS),
    *(on_gpu((name, "cuda"), id=f"{name}-cuda") for name in CUDA_BACKENDS),
]


def need_triton(device):
    """Skips where triton is missing, or could only run in the other way."""
    pytest.importorskip("triton")
    if device == "cpu":
        reason = _why_no_interpreter()
        if reason is not None:
            pytest.skip(reason)


def need_backend(name, device, *, dtype, head_size, group=1, window=False, single_tokens=False):
    """Skips what the table says the back end cannot do."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    case = AttentionCase(place, dtype, head_size, group, window, single_tokens)
    reason = why_not(name, case)
    if reason is not None:
        pytest.skip(f"{name} {reason}")


def _why_no_interpreter():
    """None where kernels run under the interpreter."""
    import numpy
    import triton

    from sppo.kernels.triton.merge import _merge_kernel

    if isinstance(_merge_kernel, triton.runtime.JITFunction):
        return "triton compiles here: its interpreter was not asked for before it was imported"
    versions = [tuple(int(x) for x in m.__version__.split(".")[:2]) for m in (triton, numpy)]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        return "the interpreter of triton below 3.7 fails with numpy 2.4"
    return None
