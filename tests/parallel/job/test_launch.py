import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from sppo.parallel.job import launch

ROOT = Path(__file__).parents[3]


def wait_for(condition, *, timeout_s=30.0):
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "nothing happened"
        time.sleep(0.02)


def signals_once_ready(*numbers, ready):
    """Send this process signals, a moment apart, once the files are there."""

    def send():
        wait_for(lambda: all(path.exists() for path in ready))
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_ranks_that_end_well(run, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = """
print("this is rank", rank, flush=True)
keys = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
Path(f"of{rank}").write_text(" ".join(os.environ[key] for key in keys))
"""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert run(code, num_ranks=3) == 0
    assert capfd.readouterr() == ("this is rank 0\n", "")
    for rank in range(3):
        assert (tmp_path / f"of{rank}").read_text() == f"3 {rank} 127.0.0.1 1"
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_bad_input_of_one_rank_is_told_and_stops_the_others(run, capfd):
    code = """
if rank == 1:
    while not Path("ready").exists():
        time.sleep(0.01)
    progress.note(step=3, position=6, action="0F2", num_actions=40)
    progress.state("failed", message="no such data")
    print("reading", flush=True)
    print("error: no such data", file=sys.stderr)
    sys.exit(2)
progress.note(step=3, position=4, action="0RECV_ACT1", num_actions=40)
progress.state("waiting_for_peer")
Path("ready").touch()
time.sleep(600)
"""
    assert run(code, num_ranks=2, grace_s=0.2) == 2
    *blame, other = capfd.readouterr().err.splitlines()
    assert blame == [
        "error: rank 1 of 2 ended with exit code 2 at step 3, action 7 of 40 (0F2)",
        "  its last 2 lines of output:",
        "  | reading",
        "  | error: no such data",
    ]
    waits = "  rank 0 was waiting for another rank at step 3, action 5 of 40 (0RECV_ACT1)"
    assert other.startswith(waits)


def test_a_rank_that_does_not_heed_sigterm_is_killed_with_its_children(run, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "_TERMINATE_S", 0.2)
    code = """
import signal, subprocess
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path("child").write_text(str(child.pid))
    Path("child").rename("ready")
    time.sleep(600)
while not Path("ready").exists():
    time.sleep(0.01)
os.abort()
"""
    started_s = time.monotonic()
    assert run(code, num_ranks=2, grace_s=0.2) == 1
    assert time.monotonic() - started_s < 30
    pid = int((tmp_path / "ready").read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or _is_zombie(pid))


def _is_zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


COUNTS_SIGNALS = """
import signal
came = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: came.append(number))
Path(f"ready{rank}").touch()
until = time.monotonic() + 30
while not came and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.5)
Path(f"came{rank}").write_text(" ".join(map(str, came)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_once(run, tmp_path, number):
    thread = signals_once_ready(number, ready=[tmp_path / f"ready{rank}" for rank in range(2)])
    assert run(COUNTS_SIGNALS, num_ranks=2) == 0
    thread.join()
    for rank in range(2):
        assert (tmp_path / f"came{rank}").read_text() == str(int(number))


@pytest.mark.exhaustive
def test_ctrl_c_in_a_terminal_reaches_every_rank_once(script, tmp_path):
    """It goes to the whole foreground group, to which the ranks do not belong."""
    job = start_job(script(COUNTS_SIGNALS), start_new_session=True)
    try:
        wait_for(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(30) == 0
    finally:
        job.kill()
        job.wait()
    for rank in range(2):
        assert (tmp_path / f"came{rank}").read_text() == str(int(signal.SIGINT))


def test_a_second_signal_kills(run, tmp_path, capfd):
    code = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(f"ready{rank}").touch()
time.sleep(600)
"""
    ready = [tmp_path / f"ready{rank}" for rank in range(2)]
    thread = signals_once_ready(signal.SIGTERM, signal.SIGTERM, ready=ready)
    assert run(code, num_ranks=2) == 128 + signal.SIGTERM
    thread.join()
    assert capfd.readouterr().err.startswith("error: after SIGTERM and SIGTERM, rank ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_all_stop_when_asked_need_no_report(run, tmp_path, capfd, number):
    """The signal comes while a rank cannot hear it yet, and is held back until it can."""
    code = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, (15, 2))
Path(f"ready{rank}").touch()
while not signal.sigpending():
    time.sleep(0.01)
from sppo.cli.stop_signals import stop_signals
with stop_signals():
    time.sleep(600)
"""
    thread = signals_once_ready(number, ready=[tmp_path / f"ready{rank}" for rank in range(2)])
    assert run(code, num_ranks=2) == 128 + number
    thread.join()
    assert capfd.readouterr().err == f"error: stopped by {number.name}\n"


SURVIVORS = {
    "in Python": ("time.sleep(600)", "was ended after that before the first step"),
    "with a lost peer": (
        "raise PeerLostError('waiting for x: Connection closed')",
        "lost another rank before the first step: waiting for x: Connection closed",
    ),
}


@pytest.mark.parametrize("survivor", SURVIVORS)
def test_the_cause_is_said_first_and_the_survivor_says_nothing(run, capfd, survivor):
    work, end = SURVIVORS[survivor]
    code = f"""
import typer
from sppo.cli.exit_codes import exit_codes
from sppo.cli.stop_signals import stop_signals
from sppo.parallel.job.peer_errors import PeerLostError
def fail():
    if rank == 0:
        Path("ready").touch()
        {work}
    while not Path("ready").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
with stop_signals():
    try:
        with exit_codes(), progress.ending():
            fail()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
"""
    assert run(code, num_ranks=2, grace_s=1.5) == 1
    cause, other = capfd.readouterr().err.splitlines()
    assert cause.startswith("error: rank 1 of 2 was killed by SIGKILL")
    assert other.startswith(f"  rank 0 {end}")


def test_what_all_ranks_refuse_is_said_once(run, capfd):
    code = """
progress.state("failed", message="no such data")
print("error: no such data", file=sys.stderr)
sys.exit(2)
"""
    assert run(code, num_ranks=3) == 2
    assert capfd.readouterr().err == "error: no such data\n"


def start_job(command, **options):
    """A process that runs two ranks of ``command``."""
    code = f"""
import os, sys
from sppo.parallel.job.launch import run_ranks
sys.exit(run_ranks({command!r}, num_ranks=2, environ=os.environ).exit_code)
"""
    return subprocess.Popen([sys.executable, "-c", code], **options)


def test_ranks_end_with_a_starter_that_is_killed(script, tmp_path):
    command = script("Path(f'pid{rank}').write_text(str(os.getpid()))\ntime.sleep(600)\n")
    paths = [tmp_path / f"pid{rank}" for rank in range(2)]
    job = start_job(command)
    try:
        wait_for(lambda: all(path.exists() and path.read_text() for path in paths))
    finally:
        job.kill()
        job.wait()
    pids = [int(path.read_text()) for path in paths]
    wait_for(lambda: all(not psutil.pid_exists(pid) or _is_zombie(pid) for pid in pids))


def test_a_rank_whose_starter_is_gone_already_does_not_begin():
    command = [sys.executable, str(launch._WRAPPER), "1", sys.executable, "-c", "print('began')"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "the process that started this rank is gone\n"


def test_a_rank_that_nccl_ends_does_not_take_the_blame(run, tmp_path, monkeypatch, capfd):
    """Rank 1 is ended by the watchdog first, for rank 0 does not send what it waits for."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "dump_"))
    code = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
progress.note(step=3, position=6, action="0F2", num_actions=40)
if rank == 1:
    while not Path("ready").exists():
        time.sleep(0.01)
    Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "1").touch()
    print("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(...)", flush=True)
    Path("aborts").touch()
    os.abort()
Path("ready").touch()
while not Path("aborts").exists():
    time.sleep(0.01)
time.sleep(0.3)
progress.state("failed", message="no such data")
sys.exit(2)
"""
    assert run(code, num_ranks=2) == 2
    errors = capfd.readouterr().err
    assert errors.startswith("error: rank 0 of 2 ended with exit code 2 at step 3")
    assert "  rank 1 was killed by SIGABRT at step 3" in errors
    assert f"dump_1 in {tmp_path}" in errors
