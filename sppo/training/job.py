"""The job that trains a run, as one of its ranks sees it: joining, decisions, and agreement."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from rich.console import Console

from sppo.config import RunConfig
from sppo.cost.sharding.heads import tensor_shard
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.environment import RankEnvironment
from sppo.parallel.job.facts import flat_facts
from sppo.parallel.job.flight_record import RankProgress
from sppo.parallel.job.open_files import allow_connections
from sppo.parallel.job.rendezvous import connect, disconnect
from sppo.parallel.job.timed_call import end_without_shutdown
from sppo.parallel.mesh import Mesh, alone
from sppo.parallel.mesh_shape import MeshShape
from sppo.training.devices.device import Device
from sppo.version import __version__

T = TypeVar("T")

_MAY_DIFFER = frozenset({"data.tokens", "data.eval_tokens", "model.from_hf"})
"""Configuration keys that may differ between ranks: paths of files of which each node may have a
copy. :func:`sppo.training.input_checks.input_facts` compares the contents."""

FAILED_STEP_TIMEOUT_S = 4.0
"""Seconds that a failed rank waits for its device, which may itself wait for other ranks in vain:
once for offloaded tensors and once for training state. Both together are shorter than the time for
which the launcher waits for the other ranks to end."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the ranks of a run, and its collectives with them."""

    mesh: Mesh
    peers: HostCollectives
    progress: RankProgress
    local_ranks: int = 1
    """Number of ranks on this machine, which share its memory and its disks."""

    @classmethod
    def alone(cls) -> Ranks:
        """Return the ranks of a process that trains alone."""
        mesh = alone()
        return cls(mesh, HostCollectives(mesh), RankProgress.create(None))

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, which prints, writes and decides for all ranks."""
        return self.mesh.is_main

    def decided_by_main(self, decide: Callable[[], T]) -> T:
        """Call `decide` on rank 0 and return its result, or raise its error, on every rank."""
        decided: tuple[T | None, Exception | None] | None = None
        if self.is_main:
            try:
                decided = decide(), None
            except Exception as error:
                decided = None, error
        value, problem = self.peers.broadcast(decided)
        if problem is not None:
            raise problem
        return value  # type: ignore[return-value]  # T may itself be None

    def done_by_all(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank and return its result; raise a failure of any rank on all.

        Errors of the first rank that failed are raised, with its number unless it is rank 0.
        """
        done, problem = None, None
        try:
            done = act()
        except Exception as error:
            problem = error
        for rank, failure in enumerate(self.peers.all_gather(problem)):
            if failure is None:
                continue
            if rank and type(failure) in (ValueError, MemoryError):
                raise type(failure)(f"rank {rank}: {failure}")
            raise failure
        return done  # type: ignore[return-value]  # T may itself be None

    def check_same(self, what: str, digest: str, *, in_replica: bool = False) -> None:
        """Raise ValueError unless all ranks computed the same `digest` from the same input.

        Args:
            what: Name of the digested object, for the message.
            digest: Digest that this rank computed.
            in_replica: Compare only ranks of the same replica.

        Raises:
            ValueError: On every rank; names the ranks that differ from the first.
        """
        told = self.peers.all_gather((self.mesh.at.data if in_replica else 0, digest))
        for replica in dict.fromkeys(whose for whose, _ in told):
            first, *others = (rank for rank, (whose, _) in enumerate(told) if whose == replica)
            different = [rank for rank in others if told[rank] != told[first]]
            if not different:
                continue
            numbers = ", ".join(map(str, different))
            who = f"rank {numbers} has" if len(different) == 1 else f"ranks {numbers} have"
            of_replica = " of the same replica" if in_replica else ""
            raise ValueError(
                f"{who} made another {what} than rank {first}{of_replica}: do all machines run the "
                "same versions of Python and numpy on the same kind of CPU?"
            )


@dataclass(frozen=True, slots=True)
class Job:
    """Training of a run, as one of its ranks sees it."""

    run: RunConfig
    ranks: Ranks
    device: Device
    console: Console
    """Console for progress and results; quiet except on rank 0."""

    @property
    def failed_step_timeout_s(self) -> float | None:
        """Longest time to wait for the copies of a failed step; None, no limit, if alone."""
        return FAILED_STEP_TIMEOUT_S if self.ranks.mesh.is_distributed else None


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
    run: RunConfig, environment: RankEnvironment | None, *, device: Device
) -> Iterator[Ranks]:
    """Connect this process with the other ranks of ``run`` for the duration of the context.

    The ranks connect over gloo; each group has its own transport for tensors between devices.

    Args:
        run: Validated run configuration.
        environment: Place of this process in the job; None for a single process.
        device: Device of this rank.

    Raises:
        ValueError: The number of ranks is not the product of the degrees of parallelism, or ranks
            have different versions or configurations.
        MemoryError: The limit of open files of this process is too low.
        PeerLostError: Another rank did not connect.
    """
    progress = RankProgress.create(None if environment is None else environment.progress_file)
    with progress.ending():
        shape = mesh_shape(run)
        shape.check(1 if environment is None else environment.world_size)
        device.begin(environment)
        if environment is None or shape.num_ranks == 1:
            yield Ranks.alone()
            return
        allow_connections(shape.num_ranks)
        mesh = _connected(run, environment, shape=shape, device=device)
        try:
            yield Ranks(mesh, HostCollectives(mesh), progress, environment.local_world_size)
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
        HostCollectives(mesh).check_same({**versions, **_configuration(run)})
    except BaseException:
        end_without_shutdown()
        raise
    return mesh


def _configuration(run: RunConfig) -> dict[str, str]:
    """Return the configuration keys, flattened, whose values must be the same on all ranks."""
    facts = flat_facts(run.model_dump(mode="json"))
    return {name: value for name, value in facts.items() if name not in _MAY_DIFFER}
