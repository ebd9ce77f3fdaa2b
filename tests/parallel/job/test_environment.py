import sys
from pathlib import Path

import pytest

from sppo.parallel.job.environment import (
    RankEnvironment,
    child_environment,
    first_host,
    nccl_dump_prefix,
    rank_environment,
    threads_of_gpu_rank,
    with_module_path,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "node[03-04]",
}
SRUN = {
    **SBATCH,
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[03-04]",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="a plain shell"),
        pytest.param({"MASTER_ADDR": "node01", "MASTER_PORT": "29500"}, id="no rank is named"),
        pytest.param(SBATCH, id="the script of sbatch"),
        pytest.param({**SBATCH, "SLURM_STEP_ID": "batch"}, id="the batch step by name"),
        pytest.param({**SBATCH, "SLURM_STEP_ID": "4294967291"}, id="the batch step by number"),
        pytest.param(
            {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
            id="the interactive step of salloc",
        ),
        pytest.param(
            {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, id="srun --pty bash"
        ),
    ],
)
def test_these_stand_alone(environ):
    assert rank_environment(environ) is None


def test_torchrun():
    assert rank_environment(TORCHRUN) == RankEnvironment(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_address="node01",
        master_port=29500,
        launcher="torchrun",
        store_is_hosted=True,
    )


def test_torchrun_under_srun_is_torchrun():
    assert rank_environment({**SRUN, **TORCHRUN}) == rank_environment(TORCHRUN)


def test_srun():
    place = rank_environment(SRUN)
    assert place == RankEnvironment(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_address="node03",
        master_port=12000 + 4711 + 202,
        launcher="slurm",
    )
    assert not place.is_one_machine


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"MASTER_PORT": "1234"}, {"master_port": 1234}),
        ({"MASTER_ADDR": "10.0.0.7"}, {"master_address": "10.0.0.7"}),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,3"}, {"local_world_size": 3}),
        ({"SLURM_STEP_NUM_TASKS": "6"}, {"world_size": 6}),
    ],
)
def test_what_srun_says_counts(changes, expected):
    place = rank_environment({**SRUN, **changes})
    assert {name: getattr(place, name) for name in expected} == expected


def test_steps_of_a_job_meet_at_different_ports():
    ports = {rank_environment({**SRUN, "SLURM_STEP_ID": str(i)}).master_port for i in range(50)}
    assert len(ports) == 50


def test_our_own_ranks():
    environ = child_environment(
        {"PATH": "/bin", **SRUN},
        rank=1,
        num_ranks=2,
        port=4000,
        threads=3,
        progress_file=Path("here"),
        nccl_dumps="/dumps/rank_",
    )
    assert environ["PATH"] == "/bin"
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == "/dumps/rank_"
    assert environ["OMP_NUM_THREADS"] == "3"
    place = rank_environment(environ)
    assert place == RankEnvironment(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        master_address="127.0.0.1",
        master_port=4000,
        launcher="sppo",
        store_is_hosted=True,
        progress_file=Path("here"),
    )
    assert place.is_one_machine


def test_threads_that_the_user_chose_stay():
    words = {"rank": 0, "num_ranks": 1, "port": 1, "progress_file": Path("here"), "nccl_dumps": ""}
    chosen = child_environment({"OMP_NUM_THREADS": "7"}, threads=1, **words)
    assert chosen["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in child_environment({}, threads=None, **words)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE not set, although RANK=5"),
        ({"LOCAL_RANK": "0"}, "RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT not set"),
        ({**TORCHRUN, "RANK": "five"}, "RANK='five' must be a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' must be a whole number of at least 0"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be .* at least 1"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be below LOCAL_WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 must be at most WORLD_SIZE=8"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT=65536 must be below 65536"),
        ({**SRUN, "SLURM_PROCID": "x"}, "SLURM_PROCID='x' must be"),
        ({**SRUN, "SLURM_PROCID": "8"}, "SLURM_PROCID=8 must be below SLURM_STEP_NUM_TASKS=8"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        ({**SRUN, "SLURM_STEP_NODELIST": "a[1-"}, r"host list 'a\[1-' is not written like"),
        ({**SRUN, "SLURM_STEP_NODELIST": "a[x]"}, r"host list 'a\[x\]' is not written like"),
        (
            without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
            "SLURM_STEP_NODELIST is not set",
        ),
        (
            without(SRUN, "SLURM_STEP_TASKS_PER_NODE"),
            "how many ranks run on node 1 of the step; start with srun --ntasks-per-node",
        ),
    ],
)
def test_what_does_not_fit_is_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        rank_environment(environ)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", "a"),
        ("b-1,a", "b-1"),
        ("node[03-05,9]", "node03"),
        ("node[7,03-05],a", "node7"),
        ("a[1-2]-ib,b[09-10]", "a1-ib"),
        ("r[1-2]n[1,3]", "r1n1"),
    ],
)
def test_the_first_host_of_a_list(hosts, expected):
    assert first_host(hosts) == expected


def test_nccl_leaves_its_dumps_where_the_user_says():
    ours = nccl_dump_prefix({})
    assert ours == nccl_dump_prefix({})
    old, new = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"
    assert nccl_dump_prefix({old: "/there/old"}) == "/there/old"
    assert nccl_dump_prefix({old: "/there/old", new: "/there/new"}) == "/there/new"


def test_ranks_find_modules_where_this_process_does(tmp_path, monkeypatch):
    """First what comes first here, none by the directory that is current later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/usr/lib/python3", "beside"])
    found = with_module_path({"PYTHONPATH": "elsewhere", "HOME": "/root"})
    here = str(tmp_path)
    assert found == {"PYTHONPATH": f"{here}:/usr/lib/python3:{here}/beside", "HOME": "/root"}


@pytest.mark.parametrize(
    ("launcher", "given", "allowed", "threads"),
    [
        ("torchrun", "1", 112, 14),  # torchrun's 1
        ("torchrun", "8", 112, 8),
        ("torchrun", None, 112, 14),
        ("sppo", "14", 112, 14),
        ("sppo", "1", 112, 1),
        ("slurm", None, 112, 14),  # --cpu-bind=none
        ("slurm", None, 14, 14),
        ("slurm", "4,2", 112, 4),
        ("slurm", "99", 14, 14),
    ],
)
def test_ranks_share_the_cores_next_to_their_gpus(launcher, given, allowed, threads):
    """Eight ranks on two sockets of 56 cores, with four GPUs each."""
    place = RankEnvironment(1, 8, 1, 8, "127.0.0.1", 1, launcher)
    environ = {"OMP_NUM_THREADS": given or "", "SLURM_CPUS_ON_NODE": "112"}
    cores = min(56, allowed)
    found = threads_of_gpu_rank(place, environ, cores=cores, ranks_near=4, allowed_cores=allowed)
    assert found == threads
