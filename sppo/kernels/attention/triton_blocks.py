"""SPPO's Triton kernels as an attention back end; importing this module imports triton."""

from __future__ import annotations

from sppo.kernels.triton.attention_backward import attention_backward
from sppo.kernels.triton.attention_forward import attention_forward


class TritonAttention:
    """SPPO's Triton kernels as a :class:`sppo.kernels.attention.kernel.AttentionKernel`."""

    forward = staticmethod(attention_forward)
    backward = staticmethod(attention_backward)
