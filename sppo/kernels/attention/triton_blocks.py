"""Our Triton kernels as a back end of attention; importing this module imports triton."""

from __future__ import annotations

from sppo.kernels.triton.attention_backward import attention_backward
from sppo.kernels.triton.attention_forward import attention_forward


class TritonAttention:
    """Our Triton kernels, as :class:`sppo.kernels.attention.kernel.AttentionKernel`."""

    forward = staticmethod(attention_forward)
    backward = staticmethod(attention_backward)
