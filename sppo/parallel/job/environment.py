"""Environment variables of ranks: read for this process, and written for ranks that sppo starts.

The only module that knows the launchers' variables: those of torchrun, which ``sppo train`` also
sets for its own ranks, and those of Slurm's srun. It does not import torch, which reads the
environment when it is imported.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sppo.parallel.job.flight_record import is_marked_stopped
from sppo.quoting import quoted

Launcher = Literal["sppo", "torchrun", "slurm"]

_MARKER = "SPPO_STARTED_RANK"
_PROGRESS_FILE = "SPPO_PROGRESS_FILE"
_STORE_IS_HOSTED = "TORCHELASTIC_USE_AGENT_STORE"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_THREADS = "OMP_NUM_THREADS"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_DEVICES = "CUDA_VISIBLE_DEVICES"
_TORCH_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_NCCL_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the file prefix for dumps of NCCL's flight recorder after a timeout; torch 2.11
and 2.13 read the first, or the second if the first is not set."""

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""First number of Slurm steps that srun does not start (batch, interactive, extern)."""
_FIRST_PORT = 12000
_NUM_PORTS = 20000
"""Size of the port range for Slurm jobs without MASTER_PORT: above the ports of services, below
the ports that systems assign."""


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Rank of this process in its job, and the address where the ranks meet.

    Attributes:
        rank: Global rank, from 0.
        world_size: Number of ranks of the job.
        local_rank: Rank among the ranks of this machine.
        local_world_size: Number of ranks on this machine.
        master_address: Host name or address of the machine of rank 0, where the ranks meet.
        master_port: Port at the master address.
        launcher: Program that started this process.
        store_is_hosted: Whether the launcher serves the rendezvous store; otherwise rank 0 does.
        progress_file: File in which the launcher expects the flight record; None if it expects
            none.
        restarts: Number of times that torchrun has started the ranks of the job again.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    launcher: Launcher
    store_is_hosted: bool = False
    progress_file: Path | None = None
    restarts: int = 0

    @property
    def is_one_machine(self) -> bool:
        """True if every rank runs on this machine."""
        return self.local_world_size == self.world_size


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Return the rank of this process; None if no launcher has started it as a rank.

    torchrun's variables take precedence over srun's, since torchrun may itself run under srun. The
    shells of sbatch, salloc and ``srun --pty bash`` are not ranks, although Slurm numbers them.

    Raises:
        ValueError: Variables are missing, are not numbers, or contradict each other.
    """
    if any(name in environ for name in _RANK_VARIABLES):
        return _from_torchrun(environ)
    if _is_slurm_task(environ):
        return _from_slurm(environ)
    return None


@contextmanager
def torch_kept_quiet(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Keep torch, if imported in the context, from printing a C++ stack per failed connection.

    torch reads the log level on import, so ``environ`` is restored afterwards. A level that the
    user has set is kept.
    """
    given = environ.get(_TORCH_LOG_LEVEL)
    environ.setdefault(_TORCH_LOG_LEVEL, "ERROR")
    try:
        yield
    finally:
        if given is None:
            environ.pop(_TORCH_LOG_LEVEL, None)


def with_module_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with a PYTHONPATH by which ``python -P`` finds this process's modules.

    The directory of the running script may be where ``sppo`` was found. ``python -m`` without -P
    would search the current directory first, where a file ``json.py`` would hide Python's module.
    """
    places = [os.path.abspath(place) for place in sys.path]  # "" is the current directory
    return {**environ, "PYTHONPATH": os.pathsep.join(places)}


def seeing_devices(environ: Mapping[str, str], devices: Sequence[int]) -> dict[str, str]:
    """Return ``environ`` for a process that sees some of the GPUs that this process sees.

    Args:
        environ: Environment of this process.
        devices: Numbers of the GPUs among those of this process.
    """
    names = [name.strip() for name in environ.get(_DEVICES, "").split(",") if name.strip()]
    seen = [names[number] if number < len(names) else str(number) for number in devices]
    return {**environ, _DEVICES: ",".join(seen)}


def child_environment(
    environ: Mapping[str, str],
    *,
    rank: int,
    num_ranks: int,
    port: int,
    threads: int | None,
    progress_file: Path,
    nccl_dumps: str,
) -> dict[str, str]:
    """Return the environment of a rank that ``sppo`` starts on this machine.

    Args:
        environ: Environment of the launcher.
        rank: Rank of the new process.
        num_ranks: Number of ranks of the job.
        port: Port at which the launcher serves the rendezvous store.
        threads: OMP_NUM_THREADS of the new process, unless the user has set it; None for no limit.
        progress_file: File in which the launcher expects the flight record.
        nccl_dumps: Result of :func:`nccl_dump_prefix`.
    """
    child = {
        **environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        _STORE_IS_HOSTED: "True",
        _MARKER: "1",
        _PROGRESS_FILE: str(progress_file),
        _NCCL_DUMPS[0]: nccl_dumps,
    }
    if threads is not None:
        child.setdefault(_THREADS, str(threads))
    return child


def threads_of_gpu_rank(
    place: RankEnvironment,
    environ: Mapping[str, str],
    *,
    cores: int,
    ranks_near: int,
    allowed_cores: int,
) -> int:
    """Return OMP_NUM_THREADS if the user has set it, or the rank's share of its cores.

    torchrun sets OMP_NUM_THREADS=1 unless it is set, which cannot be told from a 1 that the user
    sets. Ranks that update on the CPU would be several times slower, so that 1 counts as not set.

    Args:
        place: Place of the rank in its job.
        environ: Environment variables.
        cores: Cores that the rank uses.
        ranks_near: Ranks of this machine that would use the same cores. Tasks to which srun gives
            cores of their own share none.
        allowed_cores: Cores that the launcher allows the rank to use.
    """
    given = environ.get(_THREADS, "").split(",")[0].strip()
    if given.isdecimal() and int(given) > (place.launcher == "torchrun"):
        return min(int(given), cores)
    of_node = environ.get("SLURM_CPUS_ON_NODE", "")
    has_own = (
        place.launcher == "slurm"
        and of_node.isdecimal()
        and allowed_cores * place.local_world_size <= int(of_node)
    )
    return max(1, cores if has_own else cores // ranks_near)


def is_started_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a rank that ``sppo`` started, and reports the end of."""
    return _MARKER in environ


def is_stopped_rank(environ: Mapping[str, str]) -> bool:
    """Return whether ``sppo`` started this rank, and now stops it because another rank failed."""
    record = environ.get(_PROGRESS_FILE)
    return is_started_rank(environ) and record is not None and is_marked_stopped(Path(record))


def nccl_dump_prefix(environ: Mapping[str, str]) -> str:
    """Return the file prefix for the dumps of NCCL's flight recorder, one file per rank.

    Args:
        environ: Environment of the launcher, in which the user may have set a prefix.
    """
    given = next((environ[name] for name in _NCCL_DUMPS if environ.get(name)), None)
    return given or str(Path(tempfile.gettempdir(), f"sppo_{os.getpid()}_nccl_rank_"))


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    missing = [n for n in (*_RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT") if not environ.get(n)]
    if missing:
        present = [f"{name}={environ[name]}" for name in _RANK_VARIABLES if environ.get(name)]
        raise ValueError(
            f"{', '.join(missing)} not set, although {', '.join(present) or 'others'} is: a rank "
            "needs all of them; start with torchrun or srun, or unset them and let sppo train "
            "start its own ranks"
        )
    progress_file = environ.get(_PROGRESS_FILE)
    ours = is_started_rank(environ)
    return _checked(
        RankEnvironment(
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE", least=1),
            local_rank=_number(environ, "LOCAL_RANK"),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", least=1),
            master_address=environ["MASTER_ADDR"],
            master_port=_port(environ),
            launcher="sppo" if ours else "torchrun",
            store_is_hosted=environ.get(_STORE_IS_HOSTED) == "True",
            progress_file=Path(progress_file) if ours and progress_file else None,
            restarts=_number(environ, _RESTARTS) if _RESTARTS in environ else 0,
        ),
        names=_RANK_VARIABLES,
    )


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks of a Slurm step."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _FIRST_SPECIAL_STEP or "SLURM_PROCID" not in environ:
        return False
    return environ.get(_slurm_tasks(environ), "1") != "1"


def _slurm_tasks(environ: Mapping[str, str]) -> str:
    """Return the variable with the number of tasks of the step, which may differ from the job's."""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    tasks = _slurm_tasks(environ)
    address = environ.get("MASTER_ADDR") or _first_slurm_host(environ)
    if environ.get("MASTER_PORT"):
        port = _port(environ)
    else:  # equal for all tasks of a step, and probably different for each step
        step = 101 * _number(environ, "SLURM_STEP_ID")
        port = _FIRST_PORT + (_number(environ, "SLURM_JOB_ID") + step) % _NUM_PORTS
    return _checked(
        RankEnvironment(
            rank=_number(environ, "SLURM_PROCID"),
            world_size=_number(environ, tasks, least=1),
            local_rank=_number(environ, "SLURM_LOCALID"),
            local_world_size=_slurm_local_tasks(environ),
            master_address=address,
            master_port=port,
            launcher="slurm",
        ),
        names=("SLURM_PROCID", tasks, "SLURM_LOCALID", "tasks per node"),
    )


def _first_slurm_host(environ: Mapping[str, str]) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return first_host(environ[name])
    raise ValueError(
        "SLURM_STEP_NODELIST is not set, although SLURM_PROCID is: the ranks meet on its first "
        "host; start with srun, or set MASTER_ADDR to the host of rank 0"
    )


def _slurm_local_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks of the step on this node, of counts such as ``4(x2),3``."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    items = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item) for item in listed.split(",")]
    counts = [int(item[1]) for item in items if item for _ in range(int(item[2] or 1))]
    node = _number(environ, "SLURM_NODEID")
    if not all(items) or node >= len(counts):
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={quoted(listed)} does not say how many ranks run on node "
            f"{node} of the step; start with srun --ntasks-per-node=N"
        )
    return counts[node]


def first_host(hosts: str) -> str:
    """Return the first host name of a Slurm list, such as a03-ib for ``a[03-05,09]-ib,b``.

    Raises:
        ValueError: ``hosts`` does not begin like a list.
    """
    first = re.match(r"(?:[^,\[\]]|\[\d+[-,\d]*\])+(?=,|$)", hosts)
    if first is None:
        raise ValueError(
            f"host list {quoted(hosts)} is not written like node[03-05,09]; set MASTER_ADDR to the "
            "host of rank 0"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _number(environ: Mapping[str, str], name: str, *, least: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        raise ValueError(f"{name} is not set; start with torchrun, srun or sppo train itself")
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(
            f"{name}={quoted(text)} must be a whole number of at least {least}; it is set by "
            "whatever starts the ranks: start with torchrun, srun or sppo train itself"
        )
    return int(text)


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT", least=1)
    if port >= 1 << 16:
        raise ValueError(f"MASTER_PORT={port} must be below 65536; set it to a free port")
    return port


def _checked(place: RankEnvironment, *, names: tuple[str, str, str, str]) -> RankEnvironment:
    """Return ``place``; raise ValueError if the numbers, read from ``names``, are inconsistent."""
    rank, world, local_rank, local_world = names
    for name, value, rule, other, bound in (
        (rank, place.rank, "below", world, place.world_size),
        (local_rank, place.local_rank, "below", local_world, place.local_world_size),
        (local_world, place.local_world_size, "at most", world, place.world_size),
    ):
        if value > bound or (rule == "below" and value == bound):
            raise ValueError(
                f"{name}={value} must be {rule} {other}={bound}: the environment mixes two jobs; "
                "start with torchrun, srun or sppo train itself in a fresh shell"
            )
    return place
