r"""Report registers, spills, shared memory and loads of the compiled Triton kernels.

Compiles the kernels that the launchers launch, for GPUs that need not be present: tensors are on
the CPU, and Triton does everything for a launch except the launch itself. Prints a table, and
writes the figures to ``--json``. The exit code is 1 if a kernel that a bf16 training launches
spills registers.

    python scripts/compiled_kernels.py --capabilities 90 --launches few --json kernels.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from option_types import one_of, output_file, positive, several  # beside this file
from rich.console import Console

from sppo.cli.printing import table
from sppo.config.model import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from sppo.output_file import write_text

CAPABILITIES = (80, 90, 100)
"""Compute capabilities of Ampere, Hopper and Blackwell in data centres, without the point."""
_WIDTH = 150
"""Columns of the table, also when it is written to a file."""
LAUNCHES = {
    "few": (("bfloat16",), (4096,), (32000,)),
    "training": (("bfloat16",), (2048, 4096, 8192), (32000, 128256)),
    "all": (
        ("bfloat16", "float16", "float32", "float64"),
        (64, 4096, 16384),
        (1, 50257, 262144),
    ),
}
"""Dtypes, widths and sizes of the vocabulary of the launches, by the name of the choice."""
_SIZES = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_LOAD = re.compile(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)")
_COPY = re.compile(r"cp\.async\.c[ag][\w.:]*\s+\[[^]]+\],\s*\[[^]]+\],\s*(?:0x)?([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Kernel of one launch, compiled for one compute capability."""

    kernel: str
    launch: str
    """Dtype and sizes that the kernel was compiled for."""
    capability: int
    warps: int
    stages: int
    registers: int
    """Registers of a thread; at most 255."""
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    widest_load_bits: int
    """Widest load from global memory, copies to shared memory included."""

    @property
    def spills(self) -> bool:
        """Whether a thread stores values in memory, because registers ran out or ptxas chose to."""
        return self.spill_store_bytes > 0


def main() -> None:
    """Parse arguments, compile, report; ends with 1 if a kernel spills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--capabilities",
        type=several(positive),
        default=list(CAPABILITIES),
        help="compute capabilities without the point (default: 80,90,100)",
    )
    parser.add_argument(
        "--launches",
        type=one_of(*LAUNCHES),
        default="training",
        help="few: one launch of each kernel; training: what a bf16 training launches;"
        " all: every dtype, where spills are reported and no failure",
    )
    parser.add_argument("--json", type=output_file, help="write the figures to this file")
    arguments = parser.parse_args()
    kernels = compiled_kernels(arguments.capabilities, arguments.launches)
    rows = [asdict(kernel) for kernel in kernels]
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(rows, indent=1) + "\n")
    headings = [name.replace("_", " ") for name in rows[0]]
    cells = [[str(value) for value in row.values()] for row in rows]
    Console(width=_WIDTH).print(table(headings, cells, left=2))
    spilled = [kernel for kernel in kernels if kernel.spills]
    if arguments.launches != "all" and spilled:
        raise SystemExit(
            f"error: registers spill: {', '.join(dict.fromkeys(k.kernel for k in spilled))}; give"
            " these kernels smaller tiles, more warps or less to keep in sppo/kernels/triton"
        )


def compiled_kernels(capabilities: list[int], launches: str) -> list[CompiledKernel]:
    """Compile `launches` for `capabilities`, in a process that has not imported triton."""
    recorder = _Recorder()
    with tempfile.TemporaryDirectory() as cache:  # a kernel from a cache has no report of ptxas
        os.environ |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        recorder.compile_in_place_of_launches()
        for capability in capabilities:
            recorder.capability = capability
            for name, launch in _launches(launches).items():
                recorder.launch = name
                launch()
    return recorder.kernels


@dataclass
class _Recorder:
    """Replacement for Triton's driver that answers its queries and records compiled kernels."""

    capability: int = 0
    launch: str = ""
    kernels: list[CompiledKernel] = field(default_factory=list)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Return one device per compute capability: Triton caches compiled kernels by device."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def compile_in_place_of_launches(self) -> None:
        """Replace launches by compilation; a kernel is recorded when it is first compiled."""
        import triton
        from triton.runtime.jit import JITFunction

        triton.runtime.driver.set_active(self)
        triton.knobs.nvidia.dump_ptxas_log = True
        run = JITFunction.run

        def compile_only(
            kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any
        ) -> None:
            del warmup
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
            if log.getvalue():
                self._record(kernel.__name__.strip("_"), compiled, log.getvalue())

        JITFunction.run = compile_only

    def _record(self, name: str, compiled: Any, log: str) -> None:
        spills, registers = _SIZES.search(log), _REGISTERS.search(log)
        assert spills is not None, f"ptxas reports no spills: {log}"
        assert registers is not None, f"ptxas reports no registers: {log}"
        self.kernels.append(
            CompiledKernel(
                kernel=name,
                launch=self.launch,
                capability=self.capability,
                warps=compiled.metadata.num_warps,
                stages=compiled.metadata.num_stages,
                registers=int(registers[1]),
                spill_store_bytes=int(spills[1]),
                spill_load_bytes=int(spills[2]),
                shared_bytes=compiled.metadata.shared,
                widest_load_bits=_widest_load(compiled.asm["ptx"]),
            )
        )


def _widest_load(ptx: str) -> int:
    """Return the bits of a thread's widest load from global memory."""
    loads = [int(match[1] or 1) * int(match[2]) for match in _LOAD.finditer(ptx)]
    copies = [8 * int(match[1], 16) for match in _COPY.finditer(ptx)]
    return max([0, *loads, *copies])


def _launches(which: str) -> Mapping[str, Callable[[], None]]:
    """Return the launches to compile, by name: every dtype with every width and vocabulary."""
    import torch

    dtypes, widths, words = LAUNCHES[which]
    launches: dict[str, Callable[[], None]] = {}
    for name in dtypes:
        dtype = getattr(torch, name)
        for width in widths:
            launches[f"{name}, width {width}"] = partial(_elementwise, dtype, width)
        for count in words:
            launches[f"{name}, {count} words"] = partial(_cross_entropy, dtype, count)
    return launches


def _elementwise(dtype: Any, width: int) -> None:
    import torch

    from sppo.kernels.norm_parameters import NormParameters
    from sppo.kernels.triton import activations, grouped, merge, norms, rotary, sinks

    acc_dtype = torch.promote_types(dtype, torch.float32)
    x = torch.zeros(8, width, dtype=dtype)
    for bias in (None, x[0]):
        parameters = NormParameters(x[0], bias, eps=1e-6)
        norms.norm(x, parameters)
        norms.add_norm_(x.clone(), x, parameters)
        for residual in (None, x):
            norms.norm_backward(x, x, parameters, dresidual_CE=residual)
        norms.norm_backward(x, x, parameters, dresidual_CE=x, with_parameters=False)
    offset = NormParameters(x[0], None, eps=1e-6, offset=True)
    norms.norm(x, offset)
    norms.norm_backward(x, x, offset, dresidual_CE=x)
    heads, angles = x.view(8, -1, 64), torch.zeros(8, 1, 32, dtype=acc_dtype)
    for pairs in (32, 16):
        rotary.turn(heads, angles[..., :pairs], angles[..., :pairs], sign=1.0)
    sinks.sink_gradient(heads, heads, angles.new_zeros(heads.shape[1], 8), heads[0, :, 0])
    for kind in (*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS):
        gate = x.clone() if kind in GATED_ACTIVATIONS else None
        activations.activation(gate, x.clone(), kind=kind)
        activations.activation_backward_(x.clone(), gate, x.clone(), kind=kind)
    ends, products = torch.full((2,), 8, dtype=torch.int32), torch.zeros(2, width, 64)
    grouped.add_grouped_products_(products.to(acc_dtype), x, x[:, :64], ends)
    total = torch.zeros(heads.shape, dtype=acc_dtype)
    merge.merge_(total, total[:, :, 0].contiguous(), heads, total[:, :, 0].contiguous())


def _cross_entropy(dtype: Any, words: int) -> None:
    import torch

    from sppo.kernels.triton.cross_entropy import cross_entropy

    logits, labels = torch.zeros(4, words, dtype=dtype), torch.zeros(4, dtype=torch.long)
    for label_smoothing, z_loss, logits_scale in ((0.0, 0.0, 1.0), (0.1, 1e-4, 0.1)):
        for scale in (None, 1.0):
            cross_entropy(
                logits,
                labels,
                scale=scale,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                logits_scale=logits_scale,
            )


if __name__ == "__main__":
    main()
