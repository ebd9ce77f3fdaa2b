"""The job that trains a run, as one of its ranks sees it: joining, decisions, and agreement."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from sppo.config import RunConfig
from sppo.cost.sharding.heads import tensor_shard
from sppo.data.evaluated_sets import set_key
from sppo.data.tokens import LOSS_MASK_FILE, TOKENS_FILE, TokenData
from sppo.parallel.host_collectives import HostCollectives, flat_facts
from sppo.parallel.job.environment import RankEnvironment
from sppo.parallel.job.flight_record import RankProgress
from sppo.parallel.job.open_files import allow_connections
from sppo.parallel.job.rendezvous import connect, disconnect
from sppo.parallel.job.timed_call import end_without_shutdown
from sppo.parallel.mesh import Mesh, alone
from sppo.parallel.mesh_shape import MeshShape
from sppo.training.devices.device import Device
from sppo.units import KIB
from sppo.version import __version__

_MAY_DIFFER = frozenset({"data.eval_tokens", "model.from_hf"})
"""Configuration keys that may differ between ranks, beside the sources of training tokens: paths of
files of which each node may have a copy. :func:`input_facts` has their contents."""
_BLOCK_BYTES = 4 * KIB
_NUM_BLOCKS = 64
_SHOWN_DIGITS = 16

FAILED_STEP_TIMEOUT_S = 4.0
"""Seconds that a failed rank waits for its device, which may itself wait for other ranks in vain:
once for offloaded tensors and once for training state. Both together are shorter than the time for
which the launcher waits for the other ranks to end."""


@dataclass(frozen=True, slots=True)
class Job:
    """Training of a run, as one of its ranks sees it."""

    run: RunConfig
    device: Device
    console: Console
    """Console for progress and results; quiet except on rank 0."""
    mesh: Mesh
    peers: HostCollectives
    """Collectives of small values over all ranks, which decide together."""
    progress: RankProgress
    local_ranks: int = 1
    """Number of ranks on this machine, which share its memory and its disks."""

    @classmethod
    def alone(
        cls,
        run: RunConfig,
        *,
        device: Device,
        console: Console,
        progress: RankProgress | None = None,
    ) -> Job:
        """Return the job of a process that trains alone."""
        mesh = alone()
        progress = progress or RankProgress(None)
        return cls(run, device, console, mesh, HostCollectives(mesh.groups.world), progress)

    @property
    def failed_step_timeout_s(self) -> float | None:
        """Longest time to wait for the copies of a failed step; None, no limit, if alone."""
        return FAILED_STEP_TIMEOUT_S if self.mesh.is_distributed else None


def mesh_shape(run: RunConfig) -> MeshShape:
    """Return the mesh shape for the degrees of parallelism of a run.

    Raises:
        ValueError: The weights cannot be sharded evenly by the sequence parallel degree.
    """
    parallel, degree = run.parallel, run.parallel.sequence_parallel_degree
    shards_weights = parallel.sequence_parallel == "megatron" and degree > 1
    copies = tensor_shard(run.model, degree=degree).repeats if shards_weights else None
    return MeshShape.of(parallel, key_copies=copies)


@contextmanager
def joined(
    run: RunConfig, environment: RankEnvironment | None, *, device: Device, console: Console
) -> Iterator[Job]:
    """Connect this process with the other ranks of ``run`` for the duration of the context.

    The ranks connect over gloo; each group has its own transport for tensors between devices.

    Args:
        run: Validated run configuration.
        environment: Place of this process in the job; None for a single process.
        device: Device of this rank.
        console: Console for progress and results.

    Raises:
        ValueError: The number of ranks is not the product of the degrees of parallelism, or ranks
            have different versions or configurations.
        MemoryError: The limit of open files of this process is too low.
        PeerLostError: Another rank did not connect.
    """
    progress = RankProgress(None if environment is None else environment.progress_file)
    with progress.ending():
        shape = mesh_shape(run)
        shape.check(1 if environment is None else environment.world_size)
        device.begin(environment)
        if environment is None or shape.num_ranks == 1:
            yield Job.alone(run, device=device, console=console, progress=progress)
            return
        allow_connections(shape.num_ranks)
        mesh = _connected(run, environment, shape=shape, device=device)
        try:
            peers, local_ranks = HostCollectives(mesh.groups.world), environment.local_world_size
            yield Job(run, device, console, mesh, peers, progress, local_ranks)
        except BaseException:
            if device.group_device is not None:
                end_without_shutdown()
            raise
        # Not after a failure: disconnecting may wait for peers that never answer, before the error
        # is reported. The connections end with the process.
        disconnect()


def _connected(
    run: RunConfig, environment: RankEnvironment, *, shape: MeshShape, device: Device
) -> Mesh:
    """Connect all ranks, and check that they run the same.

    If that fails or is interrupted, the process is marked to end without Python's shutdown, which
    would abort while it frees half-connected groups.

    Raises:
        ValueError: Ranks have different versions or configurations.
        PeerLostError: Another rank did not connect.
    """
    timeout_s, on_device = run.parallel.timeout_s, device.group_device
    versions = {
        "SPPO": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    try:
        connect(environment, timeout_s=timeout_s)
        mesh = Mesh(shape, rank=environment.rank, timeout_s=timeout_s, device=on_device)
        HostCollectives(mesh.groups.world).check_same({**versions, **_configuration(run)})
    except BaseException:
        end_without_shutdown()
        raise
    return mesh


def _configuration(run: RunConfig) -> dict[str, str]:
    """Return the configuration keys, flattened, whose values must be the same on all ranks."""
    facts = flat_facts(run.model_dump(mode="json"))
    may_differ = _MAY_DIFFER | run.data.directories.keys()
    may_differ |= set(map(set_key, run.evaluated_sets))
    return {name: value for name, value in facts.items() if name not in may_differ}


def input_facts(run: RunConfig, sources: Sequence[TokenData]) -> dict[str, str]:
    """Return the facts about a rank's inputs that all ranks compare, by name."""
    told: dict[str, str] = {}
    for key, data in zip(run.data.directories, sources, strict=True):
        told |= token_facts(key, data)
    return told | weight_facts(run)


def weight_facts(run: RunConfig) -> dict[str, str]:
    """Return the facts about initial weights that all ranks compare, by name."""
    adapter = None if run.adapter is None else run.adapter.from_peft
    directories = {"model.from_hf": run.hf_weights, "adapter.from_peft": adapter}
    return {
        f"{key}, sample of {file.name}": fingerprint(file)
        for key, directory in directories.items()
        if directory is not None
        for file in sorted(Path(directory).glob("*.safetensors"))
    }


def token_facts(key: str, data: TokenData) -> dict[str, str]:
    """Return the facts about token data that all ranks compare, by name.

    Args:
        key: Key of the run file that names the data.
        data: Open token data.
    """
    meta = data.meta
    compared = ("dtype", "num_tokens", "tokens_sha256", "num_documents", "vocab_size")
    facts = {
        **{name: getattr(meta, name) for name in (*compared, "loss_mask_sha256")},
        "starts of documents": hashlib.sha256(data.document_offsets.data).hexdigest(),
        "tokenizer": meta.tokenizer.sha256,
        "end of document": meta.tokenizer.end_of_document,
        f"sample of {TOKENS_FILE}": fingerprint(data.directory / TOKENS_FILE),
    }
    if data.loss_mask is not None:
        facts[f"sample of {LOSS_MASK_FILE}"] = fingerprint(data.directory / LOSS_MASK_FILE)
    return {f"{key}, {name}": str(fact)[:_SHOWN_DIGITS] for name, fact in facts.items()}


def fingerprint(path: Path) -> str:
    """Return a checksum of a file's size and of 64 blocks of 4 KiB spread evenly over it.

    Distinguishes different files of any size, but may miss a few flipped bytes.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for index in range(_NUM_BLOCKS):
            start = max(0, size - _BLOCK_BYTES) * index // (_NUM_BLOCKS - 1)
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, start))
    return digest.hexdigest()[:_SHOWN_DIGITS]
