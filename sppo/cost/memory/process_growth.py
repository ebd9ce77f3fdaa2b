"""Memory that a training process takes beside tensors after its libraries are loaded, on a CPU.

The device's memory is the process's there, so all of it counts; on a GPU it is the host's.
Measured with torch 2.13 as anonymous memory between the pre-flight check and the end of runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from sppo.activations.placement import ROW_ALIGNMENT
from sppo.cost.candidate import Candidate
from sppo.cost.layer import ACCUMULATION_BYTES, Workload
from sppo.units import KIB, MIB

STEPS_BYTES = 27 * MIB
"""Threads, page tables, whole huge pages behind tensors, small tensors in the C heap, buffers of
checkpoints, pages of libraries that the first steps touch: 15 to 17 MiB on an AMD EPYC, 24 to 27
on an Intel Xeon with AMX, however many steps."""
CODE_BYTES = 3 * MIB
CODE_BYTES_PER_LENGTH = 18 * MIB
"""Bytes of code that oneDNN compiles for bf16: for attention, and three quarters of a MiB for each
of a layer's 24 products with subsequences of one length."""
CODE_BYTES_PER_ODD_LENGTH = 12 * MIB
"""Bytes of code for the rows beyond a multiple of 128 of a length that is none."""
ACTION_BYTES = 4 * KIB
"""An action of a step's program, the record of its last execution, and that of the one before."""
TOKEN_BYTES = 16
"""An input and its label, int64; a step's sequences are read at once."""
PLANNING_PROCESS_BYTES = 112 * MIB
"""The process that plans steps of samples ahead, and the one that Python keeps beside it: 93 and 13
MiB were measured, libraries included, with CPython 3.11, numpy and scipy."""
REPORT_BYTES = 32 * MIB
"""The plots at the end, 20 MiB, for which there is what training had taken."""


def process_growth_bytes(candidate: Candidate, *, background_save_bytes: int) -> int:
    """Return what one process grows by beside the tensors of the other buckets; 0 on a GPU.

    Args:
        candidate: what runs where.
        background_save_bytes: copy of the training state that is written while training goes on.
    """
    workload, lengths, sequences = candidate.workload, candidate.lengths, candidate.sequences
    if workload.hardware.device.kind != "cpu":
        return 0
    step = step_bytes(
        tokens=sequences * sum(lengths),
        units=sequences * len(lengths) * candidate.virtual_stages,
        is_pipeline=candidate.pipeline_parallel_degree > 1,
    )
    return STEPS_BYTES + code_bytes(workload, lengths=lengths) + step + background_save_bytes


def code_bytes(workload: Workload, *, lengths: Iterable[int]) -> int:
    """Return what oneDNN compiles for units of these numbers of tokens; 0 on a GPU."""
    if workload.hardware.device.kind != "cpu" or workload.element_bytes >= ACCUMULATION_BYTES:
        return 0
    distinct = {*lengths}
    odd = [length for length in distinct if length % ROW_ALIGNMENT]
    return CODE_BYTES + len(distinct) * CODE_BYTES_PER_LENGTH + len(odd) * CODE_BYTES_PER_ODD_LENGTH


def step_bytes(*, tokens: int, units: int, is_pipeline: bool = False) -> int:
    """Return what the data and the program of one step take on one rank.

    Args:
        tokens: of all its sequences.
        units: forward passes, one for each subsequence and stage.
        is_pipeline: whether each pass also receives and sends.
    """
    actions_per_unit = 6 if is_pipeline else 2
    return tokens * TOKEN_BYTES + units * actions_per_unit * ACTION_BYTES
