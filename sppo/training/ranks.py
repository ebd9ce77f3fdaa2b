"""The processes that train together: how this one joins them, and what they decide together."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from sppo.config import RunConfig
from sppo.cost.sharding.heads import tensor_shard
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.environment import RankEnvironment
from sppo.parallel.job.flight_record import RankProgress
from sppo.parallel.job.open_files import allow_connections
from sppo.parallel.job.rendezvous import connect, difference_report, disconnect, flat_facts
from sppo.parallel.job.timed_call import end_without_shutdown
from sppo.parallel.mesh import Mesh, alone
from sppo.parallel.mesh_shape import MeshShape
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.device import Device
from sppo.training.run_directory import locked_output
from sppo.version import __version__

T = TypeVar("T")

_MAY_DIFFER = frozenset({"data.tokens", "data.eval_tokens", "model.from_hf"})
"""Keys that may differ between ranks: paths of files that a node may have copies of, whose contents
:func:`sppo.training.checks.input_facts.input_facts` compares."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Place of this process among those that train the same run."""

    mesh: Mesh
    peers: HostCollectives
    progress: RankProgress
    local_ranks: int = 1
    """Ranks on this machine, which share its memory and its disks."""

    @property
    def is_main(self) -> bool:
        """Return whether this rank speaks for all."""
        return self.mesh.is_main

    def decided_by_main(self, decide: Callable[[], T]) -> T:
        """Return what rank 0 decides, on every rank; what it raises is raised everywhere."""
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

    def check_same_on_all_ranks(self, what: str, digest: str) -> None:
        """Refuse to go on with ranks that have made different things of the same input.

        Raises:
            ValueError: on every rank.
        """
        digests = self.peers.all_gather(digest)
        if len({*digests}) > 1:
            different = [rank for rank, other in enumerate(digests) if other != digests[0]]
            raise ValueError(
                f"ranks {', '.join(map(str, different))} have made another {what} than rank 0: do "
                "all machines run the same versions of Python and numpy on the same kind of CPU?"
            )

    def check_same_in_replica(self, what: str, digest: str) -> None:
        """Refuse to go on where ranks of one replica have made different things.

        Raises:
            ValueError: on every rank.
        """
        told = self.peers.all_gather((self.mesh.at.data, digest))
        firsts: dict[int, tuple[int, str]] = {}
        for rank, (replica, other) in enumerate(told):
            first, digest = firsts.setdefault(replica, (rank, other))
            if other != digest:
                raise ValueError(
                    f"rank {rank} has made another {what} than rank {first} of the same replica: "
                    "do all machines run the same versions of Python and numpy on the same kind "
                    "of CPU?"
                )

    def check_same_facts(self, facts: Mapping[str, str]) -> None:
        """Refuse to go on with ranks that read different things.

        Args:
            facts: by name, e.g. a checksum of the token data.

        Raises:
            ValueError: on every rank: which ranks differ in which fact, with both values.
        """
        report = difference_report(self.peers.all_gather(dict(facts)))
        if report:
            raise ValueError(report)


def one_rank() -> Ranks:
    """A process that trains alone."""
    mesh = alone()
    return Ranks(mesh, HostCollectives(mesh), RankProgress.create(None))


def mesh_shape(run: RunConfig) -> MeshShape:
    """The grid that a run asks for.

    Raises:
        ValueError: weights that are to be sharded cannot be, evenly.
    """
    parallel, degree = run.parallel, run.parallel.sequence_parallel_degree
    shards_weights = parallel.sequence_parallel == "megatron" and degree > 1
    copies = tensor_shard(run.model, degree=degree).repeats if shards_weights else None
    return MeshShape.of(parallel, key_copies=copies)


@contextmanager
def joined(
    run: RunConfig, environment: RankEnvironment | None, *, device: Device | None = None
) -> Iterator[Ranks]:
    """Be one of the ranks of ``run`` for as long as the context lasts.

    The ranks meet over gloo; what carries tensors between devices is made for each group.

    Args:
        run: checked.
        environment: this process's place; None: it is the only one.
        device: that this rank computes on; None: the CPU.

    Raises:
        ValueError: there are more or fewer ranks than the degrees of parallelism make, or they run
            different versions or configurations.
        MemoryError: this process may open too few files.
        PeerLostError: another rank did not come.
    """
    shape, device = mesh_shape(run), device or CpuDevice()
    shape.check(1 if environment is None else environment.world_size)
    device.begin()
    if environment is None or shape.num_ranks == 1:
        yield one_rank()
        return
    progress = RankProgress.create(environment.progress_file)
    with progress.ending():
        allow_connections(shape.num_ranks)
        mesh = _connected(run, environment, shape=shape, device=device)
        try:
            yield Ranks(mesh, HostCollectives(mesh), progress, environment.local_world_size)
        except BaseException:
            if device.group_device is not None:
                end_without_shutdown()
            raise
        # Not after a failure: leaving may wait for peers that never answer, before anyone is told
        # what failed. The process ends, and its connections with it.
        disconnect()


def _connected(
    run: RunConfig, environment: RankEnvironment, *, shape: MeshShape, device: Device
) -> Mesh:
    """Join the default group and those of the mesh.

    A command that fails here, or is asked to stop, ends without Python's shutdown: what is half
    connected aborts it when it is given back.

    Raises:
        ValueError: the ranks run different versions or configurations.
        PeerLostError: another rank did not come.
    """
    try:
        connect(
            environment,
            backend="gloo",
            timeout_s=run.parallel.timeout_s,
            facts={
                "SPPO": __version__,
                "torch": torch.__version__,
                "Python": platform.python_version(),
                **_configuration(run),
            },
        )
        return Mesh(
            shape,
            rank=environment.rank,
            timeout_s=run.parallel.timeout_s,
            device=device.group_device,
        )
    except BaseException:
        end_without_shutdown()
        raise


def _configuration(run: RunConfig) -> dict[str, str]:
    """Return what ranks must be told alike; of data they compare contents, not places."""
    facts = flat_facts(run.model_dump(mode="json"))
    return {name: value for name, value in facts.items() if name not in _MAY_DIFFER}


@contextmanager
def shared_output(run: RunConfig, ranks: Ranks) -> Iterator[Path]:
    """The output directory, made and locked by rank 0 for all.

    Raises:
        ValueError: see :func:`sppo.training.run_directory.locked_output`.
    """
    with ExitStack() as stack:
        yield ranks.decided_by_main(lambda: stack.enter_context(locked_output(run)))
