"""Connections of a rank: the groups of the mesh, and the rank's place in its pipeline."""

from __future__ import annotations

import logging
import math

from sppo.activations.subsequence_placement import planned_placement
from sppo.config import RunConfig
from sppo.cost.communicators import CommunicatorUse
from sppo.cost.memory.stage_memory import MemoryBuckets
from sppo.engine.pipeline import Pipeline
from sppo.parallel.job.timeouts import issued_timeout, stall_timeout
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.parallel.mesh import Mesh
from sppo.parallel.msp_exchange import MspLinks
from sppo.parallel.pipeline_p2p import PipelineLinks
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.planning.plan import ExecutionPlan
from sppo.schedule.msp_groups import msp_ranges
from sppo.training.job import Job
from sppo.units import format_bytes

_log = logging.getLogger(__name__)


def connect_pipeline(job: Job, plan: ExecutionPlan) -> Pipeline:
    """Connect the groups of the mesh, and return the rank's place in its pipeline.

    Raises:
        MemoryError: See :func:`check_communicators`.
    """
    run, mesh, place = job.run, job.mesh, job.device.torch_device
    free_before = job.device.free_bytes(local_ranks=1)
    # Steps of samples are planned later, and may take much longer than a step of the longest ones.
    differ = run.data.samples == "documents"
    predicted_step_s = math.inf if differ else plan.predicted.step_s
    stall_timeout_s = stall_timeout(run.parallel.timeout_s, predicted_step_s=predicted_step_s)
    mesh.connect(
        CommunicatorUse.of(plan.candidate()),
        timeout_s=issued_timeout(stall_timeout_s) if mesh.uses_nccl else None,
    )
    if mesh.uses_nccl:
        mesh.send_first_messages()
    program = plan.program()
    msp_links = MspLinks(mesh, device=place) if plan.uses_msp else None
    if msp_links is not None:
        msp_links.connect(msp_ranges(program.msp_groups))
    if mesh.uses_nccl:
        planned = plan.rank_memory[mesh.at.pipeline].device
        left_bytes = job.device.free_bytes(local_ranks=1)
        check_communicators(free_before - left_bytes, left_bytes=left_bytes, planned=planned)
    return Pipeline(
        schedule=plan.schedule,
        num_ranks=mesh.shape.pipeline_parallel,
        rank=mesh.at.pipeline,
        num_virtual=plan.virtual_stages,
        p2p=PipelineLinks(mesh, device=place) if mesh.groups.edges else None,
        planned=program,
        placements={n: planned_placement(s.subsequences) for n, s in enumerate(plan.stages)},
        kv_offloaded=[n for n, kv in enumerate(plan.kv_of_stages) if kv == "offloaded"],
        kv_recomputed=[n for n, kv in enumerate(plan.kv_of_stages) if kv == "recomputed"],
        recomputes_windows=plan.windowed_kv == "recomputed",
        msp_links=msp_links,
        input_every=run.activations.input_every,
        exchange=_exchange(run, mesh),
    )


def check_communicators(taken_bytes: int, *, left_bytes: int, planned: MemoryBuckets) -> None:
    """Compare the device memory that NCCL has taken for communicators with the plan.

    Args:
        taken_bytes: Device memory that the communicators took.
        left_bytes: Free device memory after that.
        planned: Memory of the rank's device in the plan.

    Raises:
        MemoryError: The memory that is left is less than the plan needs beside communicators.
    """
    expected = planned.communicators_bytes
    needed = planned.total_bytes - expected
    found = (
        f"NCCL's communicators take {format_bytes(max(0, taken_bytes))} of the device, planned "
        f"{format_bytes(expected)}"
    )
    remedy = (
        "set NCCL_BUFFSIZE=2097152 in the environment of every rank (half of NCCL's largest "
        "buffers), or solve again with a larger hardware.margin"
    )
    if needed > left_bytes:
        raise MemoryError(
            f"{found}; the plan needs {format_bytes(needed)} beside them, and "
            f"{format_bytes(left_bytes)} are left: {remedy}, or with parallel.multiplexed=off if "
            "it is on"
        )
    if taken_bytes > expected:
        _log.warning("%s: if memory runs out, %s", found, remedy)
    else:
        _log.info("%s", found)


def _exchange(run: RunConfig, mesh: Mesh) -> UlyssesAllToAll | MegatronSequenceParallel | None:
    if mesh.groups.sequence is None:
        return None
    if mesh.shape.key_copies is not None:
        return MegatronSequenceParallel(
            mesh.groups.sequence, rank=mesh.at.sequence, model=run.model
        )
    return UlyssesAllToAll(
        mesh.groups.sequence,
        rank=mesh.at.sequence,
        num_heads=run.model.num_heads,
        kv_heads=run.model.kv_heads,
    )
