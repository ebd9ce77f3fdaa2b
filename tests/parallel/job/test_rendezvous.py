import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from sppo.parallel.host_collectives import difference_report, flat_facts
from sppo.parallel.job import rendezvous
from sppo.parallel.job.environment import RankEnvironment
from sppo.parallel.job.peer_errors import PeerLostError
from sppo.parallel.job.rendezvous import connect
from tests.tiers import exhaustive

CONNECTED = """
import torch
import torch.distributed as dist
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.peer_errors import PeerLostError, peer_errors
from sppo.parallel.job.rendezvous import connect, disconnect
from sppo.parallel.mesh import Mesh
from sppo.parallel.mesh_shape import MeshShape

TIMEOUT_S = 30.0

def connected(**words):
    connect(place, **{"timeout_s": TIMEOUT_S, **words})
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def place_at(port, **changes):
    place = RankEnvironment(
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=2,
        master_address="127.0.0.1",
        master_port=port,
        launcher="slurm",
    )
    return replace(place, **changes)


@pytest.mark.exhaustive
def test_ranks_meet_compute_and_part(run, tmp_path):
    """Where rank 0 serves their meeting place, as under srun, and not the launcher."""
    code = f"""
from dataclasses import replace
place = replace(place, store_is_hosted=False, master_port={free_port()})
connected()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
disconnect()
disconnect()
Path(f"total{{rank}}").write_text(f"{{total.item()}} {{os.environ['GLOO_SOCKET_IFNAME']}}")
"""
    assert run(CONNECTED + code, num_ranks=2) == 0
    for rank in range(2):
        assert (tmp_path / f"total{rank}").read_text() == "3.0 lo"


def test_ranks_that_torchrun_starts_again_meet_in_the_same_store(run, tmp_path):
    """Rank 1 had not come when rank 0 gave up, and the store keeps what rank 0 has said."""
    code = """
if not place.restarts:
    if rank == 0:
        try:
            connected(timeout_s=1.0)
        except PeerLostError:
            pass
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "TORCHELASTIC_RESTART_COUNT": "1"})
connected()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
Path(f"total{rank}").write_text(f"{total.item()}")
"""
    assert run(CONNECTED + code, num_ranks=2) == 0
    assert [(tmp_path / f"total{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]


def test_facts_that_some_ranks_lack_differ():
    report = difference_report([{"a": "1"}, {"a": "1", "b": "2"}, {"a": "1", "b": "2"}])
    assert report.splitlines()[1:-1] == ["  b: nothing on rank 0, 2 on ranks 1, 2"]
    assert difference_report([{"a": "1"}, {"a": "1"}]) == ""


def test_a_difference_of_configurations_names_its_key():
    runs = [{"parallel": {"zero": zero, "schedule": "1f1b"}, "hardware": "auto"} for zero in (0, 1)]
    report = difference_report([flat_facts(run) for run in runs])
    assert report.splitlines()[1:-1] == ["  parallel.zero: 0 on rank 0, 1 on rank 1"]


@pytest.mark.parametrize(
    "operation", ["dist.recv(tensor, 1)", *exhaustive("dist.all_reduce(tensor)")]
)
def test_a_killed_rank_ends_the_job_and_is_named(run, capfd, operation):
    """The kill comes while rank 0 waits for it."""
    code = f"""
connected()
import signal
if rank == 1:
    progress.note(step=3, position=6, action="0F2", num_actions=40)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
tensor = torch.zeros(1)
with progress.ending():
    progress.note(step=3, position=8, action="0RECV_ACT2", num_actions=41)
    progress.state("waiting_for_peer")
    with peer_errors("waiting for 0SEND_ACT2 from rank 1"):
        {operation}
"""
    started_s = time.monotonic()
    assert run(CONNECTED + code, num_ranks=2) == 1
    assert time.monotonic() - started_s < 60
    report = capfd.readouterr().err
    report = report[report.index("error: rank") :].splitlines()
    assert report[0].startswith("error: rank 1 of 2 was killed by SIGKILL")
    assert report[0].endswith("at step 3, action 7 of 40 (0F2)")
    assert report[1].startswith(
        "  rank 0 lost another rank at step 3, action 9 of 41 (0RECV_ACT2): waiting for "
        "0SEND_ACT2 from rank 1: "
    )


LIMITED = """
import resource
from sppo.parallel.job.open_files import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    allow_connections(2)
except MemoryError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "told"),
    [
        pytest.param(50, 200, "(200, 200)\n", marks=pytest.mark.exhaustive),
        (
            50,
            64,
            "a rank of 2 opens about 76 files and connections, and this process may open 64: raise "
            "that limit (ulimit -n)\n(64, 64)\n",
        ),
    ],
)
def test_a_limit_of_open_files_is_raised_or_refused(soft, hard, told):
    command = [sys.executable, "-c", LIMITED.format(soft=soft, hard=hard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == told


def test_ranks_that_do_not_come_are_named():
    started_s = time.monotonic()
    with pytest.raises(PeerLostError, match=r"^rank 1 did not come within 0\.5 s"):
        connect(place_at(free_port()), timeout_s=0.5)
    assert time.monotonic() - started_s < 20


def test_a_port_in_use_is_refused():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1.* in use .*MASTER_PORT"):
            connect(place_at(port), timeout_s=5)


@pytest.fixture
def foreign_port():
    """Where a program listens that is no meeting place, and what it sends to those that come."""

    def listen(says):
        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.sendall(says)
                kept.append(connection)

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()[1]

    kept = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listen
    for connection in kept:
        connection.close()


def test_a_master_that_accepts_and_does_not_answer(foreign_port, monkeypatch):
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 0.5)
    port = foreign_port(b"")
    started_s = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        connect(place_at(port, rank=1), timeout_s=0.5)
    assert time.monotonic() - started_s < 20
    assert str(caught.value).startswith("rank 1 timed out after 0.5 s (parallel.timeout_s): ")
    assert f"127.0.0.1 port {port}, " in str(caught.value)
    assert "set MASTER_PORT to a free one" in str(caught.value)


def test_a_master_that_answers_something_else(foreign_port):
    port = foreign_port(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
    with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1.* in use .*MASTER_PORT"):
        connect(place_at(port, rank=1), timeout_s=1)


def test_a_master_that_is_not_there_is_a_lost_peer():
    port = free_port()
    with pytest.raises(PeerLostError, match=f"rank 1 cannot reach 127.0.0.1 port {port}"):
        connect(place_at(port, rank=1), timeout_s=1)


def test_a_host_without_an_address_is_refused(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", unknown)
    place = place_at(1234, master_address="nowhere")
    with pytest.raises(ValueError, match="host 'nowhere'.* no address .*MASTER_ADDR"):
        connect(place, timeout_s=5)


def test_the_users_interface_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    rendezvous.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("local_world_size", [1, 2])
def test_between_machines_the_interface_is_named(monkeypatch, local_world_size):
    def lost(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed with timed out connecting")

    monkeypatch.setattr(
        rendezvous, "_connect_to_store", lambda *_, **__: rendezvous.dist.HashStore()
    )
    monkeypatch.setattr(rendezvous, "_wait_for_all", lambda *_, **__: 1)
    monkeypatch.setattr(rendezvous.dist, "init_process_group", lost)
    monkeypatch.setattr(rendezvous, "use_loopback", lambda: None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(PeerLostError) as caught:
        connect(place_at(1, local_world_size=local_world_size), timeout_s=1)
    is_named = "GLOO_SOCKET_IFNAME is not set: set it to the network" in str(caught.value)
    assert is_named == (local_world_size == 1)
