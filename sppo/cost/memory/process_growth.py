"""Memory beyond tensors that a training process allocates after loading its libraries, on a CPU.

On a CPU this growth is device memory; on a GPU it is host memory and counts as 0. Constants were
measured with torch 2.13 as anonymous memory between the pre-flight check and the end of runs. Pages
of libraries that the first steps touch, 12 to 19 MiB, are not counted: the system shares them among
processes, and drops them if memory is short.
"""

from __future__ import annotations

from collections.abc import Iterable

from sppo.activations.placement import ROW_ALIGNMENT
from sppo.cost.candidate import Candidate
from sppo.cost.workload import ACCUMULATION_BYTES, Workload
from sppo.units import KIB, MIB

STEPS_BYTES = 10 * MIB
"""Bytes of threads, buffers of products in fp32, tensors below the pool's smallest, and Python
objects in the C heap: 3 to 13 MiB on an AMD EPYC, whatever the number of steps, and 16 MiB with
MSP, where gloo adds up gradients in copies."""
POOL_FREE_BYTES = 12 * MIB
"""Allowance for memory that the pool has from the system and no tensor uses at the peak.

Freed pages go back to the system only as whole huge pages (2 MiB), so each hole between two tensors
may keep up to two of them. Which holes there are depends on the order of allocations, also of the
threads that send and receive; 2 to 10 MiB were measured. Reported as "free in the pool"."""
CODE_BYTES = 3 * MIB
CODE_BYTES_PER_LENGTH = 18 * MIB
"""Bytes of code that oneDNN compiles for bf16 per distinct subsequence length: 3/4 MiB for each of
a layer's 24 products. `CODE_BYTES` is for attention, whatever the lengths."""
CODE_BYTES_PER_ODD_LENGTH = 12 * MIB
"""Further bytes of code per length that is no multiple of 128, for the remaining rows."""
CODE_BYTES_PER_ADAPTED_LENGTH = 8 * MIB
"""Further bytes of code per length in a run with adapters, whose products are more: 7 to 8 MiB were
measured."""
ACTION_BYTES = 4 * KIB
"""Bytes of an action of a program and of the records of its last two executions."""
TOKEN_BYTES = 16
"""Bytes of an input token and its label, int64; all sequences of a step are read at once."""
PLANNING_PROCESS_BYTES = 112 * MIB
"""Bytes of the process that plans steps of samples ahead, and of Python's helper process beside it.

Measured: 93 and 13 MiB, libraries included, with CPython 3.11, numpy, and scipy, then in use."""
REPORT_BYTES = 32 * MIB
"""Bytes for the plots at the end of a run, which take 20 MiB."""


def process_growth_bytes(candidate: Candidate) -> int:
    """Return the bytes that one process allocates beyond the tensors of other buckets; 0 on a GPU.

    The copy of the training state for background checkpoints is not included.
    """
    workload, lengths, sequences = candidate.workload, candidate.lengths, candidate.sequences
    if workload.hardware.device.kind != "cpu":
        return 0
    step = step_bytes(
        tokens=sequences * sum(lengths),
        units=sequences * len(lengths) * candidate.virtual_stages,
        is_pipeline=candidate.pipeline_parallel_degree > 1,
    )
    fixed = STEPS_BYTES + POOL_FREE_BYTES
    return fixed + code_bytes(workload, lengths=lengths) + step


def code_bytes(workload: Workload, *, lengths: Iterable[int]) -> int:
    """Return the bytes of code that oneDNN compiles for `lengths`; 0 where it compiles none.

    It compiles none on a GPU, in fp32, and on a CPU without products in half precision.
    """
    device = workload.hardware.device
    compiles = device.kind == "cpu" and device.half_products
    if not compiles or workload.element_bytes >= ACCUMULATION_BYTES:
        return 0
    distinct = {*lengths}
    odd = [length for length in distinct if length % ROW_ALIGNMENT]
    of_length = CODE_BYTES_PER_LENGTH
    if workload.trainable.adapter is not None:
        of_length += CODE_BYTES_PER_ADAPTED_LENGTH
    return CODE_BYTES + len(distinct) * of_length + len(odd) * CODE_BYTES_PER_ODD_LENGTH


def step_bytes(*, tokens: int, units: int, is_pipeline: bool = False) -> int:
    """Return the bytes of the data and the program of one step on one rank.

    Args:
        tokens: Tokens of all sequences of the step.
        units: Number of forward passes, one per subsequence and stage.
        is_pipeline: Whether each pass also receives and sends.
    """
    actions_per_unit = 6 if is_pipeline else 2
    return tokens * TOKEN_BYTES + units * actions_per_unit * ACTION_BYTES
