"""Compile what the launchers launch, for a GPU that need not be there.

Run as a program, in a process where triton compiles: prints a JSON list of the kernels. Tensors are
on the CPU. Triton does all that it does for a launch, the kinds of the arguments included, and
stops before the launch itself.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class AbsentGpu:
    """What triton asks a driver before it compiles."""

    def __init__(self, capability):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_in_place_of_launches(capability):
    """From here on a launch compiles; returns the list that tells of it."""
    triton.runtime.driver.set_active(AbsentGpu(capability))
    run = JITFunction.run
    done = []

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        name = self.__name__.strip("_")
        done.append({"kernel": name, "shared_bytes": kernel.metadata.shared})

    JITFunction.run = compile_only
    return done


def launch_attention(dtype, head_size, window):
    from sppo.kernels.triton.attention_backward import attention_backward
    from sppo.kernels.triton.attention_forward import attention_forward

    acc_dtype = torch.promote_types(dtype, torch.float32)
    q = torch.zeros(64, 4, head_size, dtype=dtype)
    k = torch.zeros(128, 2, head_size, dtype=dtype)
    options = {"scale": 0.1, "window": window, "document_starts": (0,)}
    o, lse = attention_forward(q, k, k, **options)
    dk, dv = k.to(acc_dtype), k.to(acc_dtype)
    attention_backward(q, q, k, k, o, lse, dk_TKD=dk, dv_TKD=dv, **options)


def launch_elementwise(dtype, width):
    from sppo.kernels.triton import activations, merge, norms, rotary

    acc_dtype = torch.promote_types(dtype, torch.float32)
    x = torch.zeros(8, width, dtype=dtype)
    norms.rms_norm(x, x[0], eps=1e-6)
    norms.rms_norm_backward(x, x, x[0], eps=1e-6)
    norms.layer_norm(x, x[0], x[0], eps=1e-6)
    norms.layer_norm_backward(x, x, x[0], x[0], eps=1e-6)
    norms.add_rms_norm_(x.clone(), x, x[0], eps=1e-6)
    norms.rms_norm_backward(x, x, x[0], eps=1e-6, dresidual_CE=x)
    norms.add_layer_norm_(x.clone(), x, x[0], x[0], eps=1e-6)
    norms.layer_norm_backward(x, x, x[0], x[0], eps=1e-6, dresidual_CE=x)
    heads, angles = x.view(8, -1, 64), torch.zeros(8, 1, 32, dtype=acc_dtype)
    rotary.turn(heads, angles, angles, sign=1.0)
    activations.activation(x, x.clone(), kind="swiglu")
    for kind in ("swiglu", "gelu", "gelu_tanh"):
        gate = x.clone() if kind == "swiglu" else None
        activations.activation_backward_(x.clone(), gate, x.clone(), kind=kind)
    total = torch.zeros(heads.shape, dtype=acc_dtype)
    merge.merge_(total, total[:, :, 0].contiguous(), heads, total[:, :, 0].contiguous())


def launch_cross_entropy(dtype, words):
    from sppo.kernels.triton.cross_entropy import losses_to_gradient_, token_losses

    logits, labels = torch.zeros(4, words, dtype=dtype), torch.zeros(4, dtype=torch.long)
    for label_smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-4)):
        terms = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        token_losses(logits, labels, **terms)
        losses_to_gradient_(logits, labels, scale=1.0, **terms)


def launch_gradient_norm(dtype):
    from sppo.kernels.triton.gradient_norm import scale_, total_norm

    for begin in (0, 1):  # aligned, and not
        tensors = [torch.zeros(100, dtype=dtype)[begin:], torch.zeros(70000, dtype=dtype)]
        scale_(tensors, total_norm(tensors))


def main(capability, everything):
    done = compile_in_place_of_launches(capability)
    launch_elementwise(torch.bfloat16, 4096)
    launch_cross_entropy(torch.bfloat16, 32000)
    launch_gradient_norm(torch.float32)
    launch_attention(torch.bfloat16, 64, 40)
    if everything:
        for head_size in (64, 96, 128, 256):
            for dtype in (torch.bfloat16, torch.float32):
                for window in (None, 40):
                    launch_attention(dtype, head_size, window)
        launch_attention(torch.float64, 64, 40)
        launch_gradient_norm(torch.float64)
        for dtype in (torch.float16, torch.float32, torch.float64):
            for width in (64, 4096, 16384):
                launch_elementwise(dtype, width)
            for words in (1, 50257, 262144):
                launch_cross_entropy(dtype, words)
    print(json.dumps(done))


if __name__ == "__main__":
    main(int(sys.argv[1]), "everything" in sys.argv)
