import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from sppo.cli.stop_signals import Stopped
from sppo.parallel.job.failure_report import RankEnd, exit_code, failure_report, first_failure
from sppo.parallel.job.flight_record import ProgressNote, RankProgress, RankState, read_progress
from sppo.parallel.job.job_end import JobEnd
from sppo.parallel.job.peer_errors import LATE, PeerLostError, peer_errors


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:46233. "
            "This is typically caused by a remote worker crashing. Check its logs.",
            "Connection closed by peer [127.0.0.1]:46233",
        ),
        (
            "[/build/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv "
            "operation to complete",
            f"timed out after 3 s{LATE}",
        ),
        (
            "[/build/gloo/transport/tcp/pair.cc:144] Application timeout caused pair closure",
            "timed out before, and closed the connection then",
        ),
        ("wait timeout after 3500ms, keys: /0/1\nmore", f"timed out after 3.5 s{LATE}"),
        ("NCCL error\nncclRemoteError: a peer", "ncclRemoteError: a peer"),
    ],
)
def test_errors_that_mean_a_lost_peer(text, reason):
    with pytest.raises(PeerLostError) as caught, peer_errors("waiting for x"):
        raise RuntimeError(text)
    assert str(caught.value) == f"waiting for x: {reason}"
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("Timed out waiting"),
        PeerLostError("already said"),
    ],
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as caught, peer_errors("waiting for x"):
        raise error
    assert caught.value is error


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank0"


def test_a_record_comes_back(path):
    progress = RankProgress(path)
    note = read_progress(path)
    assert (note.state, note.step) == ("starting", None)
    assert note.place() == "before the first step"
    before_s = time.monotonic()
    progress.note(step=3, position=6, action="0F2", num_actions=40)
    note = read_progress(path)
    assert (note.state, note.step, note.position) == ("running", 3, 6)
    assert note.place() == "step 3, action 7 of 40 (0F2)"
    assert before_s <= note.changed_s <= time.monotonic()
    progress.note(step=3, position=7, action="0F3")
    progress.state("waiting_for_peer")
    note = read_progress(path)
    assert note.state == "waiting_for_peer"
    assert note.place() == "step 3, action 8 of 40 (0F3)"


def test_long_messages_are_cut(path):
    progress = RankProgress(path)
    progress.note(step=0, position=0, action="é", num_actions=1)
    progress.state("failed", message="m\n" * 5000)
    note = read_progress(path)
    assert note.action == "é"
    assert set(note.message) == {"m", "\n"}
    progress.state("done")
    assert read_progress(path).message == ""


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    progress = RankProgress(None)
    progress.note(step=0, position=0, action="0F0", num_actions=1)
    progress.state("done")
    assert list(tmp_path.iterdir()) == []


def test_no_file_and_half_a_file_are_no_record(path):
    assert read_progress(path) is None
    path.touch()
    assert read_progress(path) is None
    path.write_bytes(bytes(1 << 16))
    assert read_progress(path) is None


WRITER = """
import sys, time
from pathlib import Path
from sppo.parallel.job.flight_record import RankProgress

progress = RankProgress(Path(sys.argv[1]))
for number in range(10**9):
    progress.note(step=number, position=number, action=str(number % 10) * 40, num_actions=number)
    print(number, flush=True)
    time.sleep(0.001)
"""


def test_the_last_record_survives_a_kill(path):
    words = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        for _ in range(10):
            seen = int(writer.stdout.readline())
        writer.kill()
    last = read_progress(path)
    assert last.step >= seen
    assert last.position == last.num_actions == last.step
    assert last.action == str(last.step % 10) * 40


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (PeerLostError("rank 1 is gone"), "peer_lost", "rank 1 is gone"),
        (ValueError("no such data"), "failed", "no such data"),
        (KeyError("x"), "failed", "KeyError: 'x'"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt: "),
        (SystemExit(2), "failed", ""),
        (SystemExit(0), "done", ""),
        (typer.Exit(4), "failed", ""),
        (typer.Exit(), "done", ""),
    ],
)
def test_how_it_ended_is_noted(path, error, state, message):
    progress = RankProgress(path)
    with pytest.raises(type(error)), progress.ending():
        raise error
    note = read_progress(path)
    assert (note.state, note.message) == (state, message)


def test_a_good_end_is_noted(path):
    progress = RankProgress(path)
    with progress.ending():
        progress.note(step=0, position=0, action="0F0", num_actions=1)
    assert read_progress(path).state == "done"


def end(
    rank: int,
    returncode: int,
    *,
    state: RankState | None = "running",
    at_s: float = 10.0,
    ended_s: float = 20.0,
    message: str = "",
    stopped: bool = False,
    last_lines: tuple[str, ...] = (),
) -> RankEnd:
    note = None
    if state is not None:
        note = ProgressNote(
            state=state,
            step=3,
            position=6,
            num_actions=40,
            action="0F2",
            changed_s=at_s,
            message=message,
        )
    return RankEnd(rank, returncode, ended_s, stopped, note, last_lines)


@pytest.mark.parametrize(
    ("ends", "blamed"),
    [
        pytest.param(
            [end(0, 1, state="peer_lost", at_s=1), end(1, -9, ended_s=5)], 1, id="killed over lost"
        ),
        pytest.param(
            [end(0, 1, state="peer_lost", at_s=1), end(1, 2, state="failed", at_s=5)],
            1,
            id="failed over lost",
        ),
        pytest.param(
            [end(0, -15, stopped=True, ended_s=1), end(1, 1, state="peer_lost", at_s=5)],
            1,
            id="lost over stopped",
        ),
        pytest.param(
            [end(0, 2, state="failed", at_s=6), end(1, 2, state="failed", at_s=5)],
            1,
            id="the earlier",
        ),
        pytest.param(
            [end(0, 1, state="failed", at_s=3, ended_s=9), end(1, -9, ended_s=4)],
            0,
            id="a failure counts from its word, a kill from its end",
        ),
        pytest.param([end(0, -11, state=None), end(1, 1, state="peer_lost")], 0, id="no word"),
        pytest.param(
            [end(0, -6, ended_s=4), end(1, 2, state="failed", at_s=5)], 1, id="failed over aborted"
        ),
        pytest.param(
            [end(0, -6, state="waiting_for_peer", ended_s=4), end(1, -9, ended_s=5)],
            1,
            id="killed over aborted",
        ),
        pytest.param(
            [end(0, 1, state="peer_lost", at_s=4), end(1, -6, ended_s=5)],
            1,
            id="aborted over lost",
        ),
        pytest.param(
            [end(0, -6, ended_s=4), end(1, -6, state="failed", at_s=5)],
            1,
            id="aborted on its way out after a failure",
        ),
    ],
)
def test_who_is_to_blame(ends, blamed):
    assert first_failure(ends).rank == blamed


@pytest.mark.parametrize(("returncode", "code"), [(2, 2), (4, 4), (-9, 1), (-15, 1)])
def test_exit_codes(returncode, code):
    assert exit_code(end(0, returncode)) == code


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (end(0, 143, state="failed"), 143),
        (end(0, -15, state=None), 143),
        (end(0, 1, state="peer_lost"), 143),
        (end(0, -9, stopped=True), 143),
        (end(0, 4, state="failed"), 4),
    ],
)
def test_exit_codes_of_a_job_that_was_asked_to_stop(end, code):
    assert exit_code(end, asked=["SIGTERM", "SIGINT"]) == code


def test_a_rank_that_a_signal_stopped():
    ends = [end(0, 1, state="peer_lost", message="closed"), end(1, 143, state="failed")]
    first = first_failure(ends)
    assert first is ends[1]
    assert failure_report(ends, first=first, asked=[]).startswith(
        "error: rank 1 of 2 was stopped by SIGTERM at step 3"
    )
    assert exit_code(first) == 143


def test_the_rank_that_did_not_answer_is_to_blame():
    late = "waiting for 0SEND_ACT2 from rank 1: timed out after 8 s"
    ends = [
        end(0, 1, state="peer_lost", at_s=18, message=late),
        end(1, -9, stopped=True, at_s=9, ended_s=30),
        end(2, -9, stopped=True, at_s=12, ended_s=30),
    ]
    lines = failure_report(ends, first=first_failure(ends), asked=[]).splitlines()
    assert lines[0] == (
        "error: rank 1 of 3 did not answer, and rank 0 timed out after 8 s: rank 1 was running at "
        "step 3, action 7 of 40 (0F2), for 21 s"
    )
    assert lines[1].endswith(f"(0F2): {late}")
    assert lines[2].startswith("  rank 2 was running")
    assert len(lines) == 3
    job = JobEnd(tuple(ends), started_s=0.0)
    assert job.blamed is ends[1]
    assert job.seconds()["noticed"] == job.ends[0].ended_s - 9


def test_a_rank_whose_earlier_wait_ran_out_does_not_take_the_blame():
    late = "meeting the other shards of a unit: timed out before, and closed the connection then"
    ends = [
        end(0, 1, state="peer_lost", at_s=18, message=late),
        end(1, -9, stopped=True, at_s=9, ended_s=30),
    ]
    headline = failure_report(ends, first=first_failure(ends), asked=[]).splitlines()[0]
    assert headline.startswith("error: rank 1 of 2 did not answer, and rank 0 timed out: rank 1 ")


def test_ranks_that_all_timed_out_leave_the_first_to_blame():
    late = "hearing from every rank: timed out after 8 s"
    ends = [end(rank, 1, state="peer_lost", at_s=18 - rank, message=late) for rank in range(2)]
    assert failure_report(ends, first=first_failure(ends), asked=[]).startswith("error: rank 1 of")


def test_a_rank_that_a_library_aborted_is_to_blame():
    ends = [
        end(0, -9, stopped=True, at_s=9, ended_s=30),
        end(1, -6, ended_s=18),
        end(2, 1, state="peer_lost", at_s=19, message="step 3: timed out after 8 s"),
    ]
    report = failure_report(ends, first=first_failure(ends), asked=[])
    assert report.startswith("error: rank 1 of 3 was killed by SIGABRT at step 3")


def test_what_nccl_leaves_is_named():
    dumps = [Path("/dumps/rank_0"), Path("/dumps/rank_1")]
    ends = [end(0, 2, state="failed"), end(1, -6)]
    report = failure_report(ends, first=ends[0], asked=[], dumps=dumps)
    assert report.splitlines()[-1] == (
        "  what NCCL was about (torchfrtrace reads it): rank_0, rank_1 in /dumps"
    )


def test_a_failure_that_is_told_again_keeps_its_time_and_gets_its_last_message(path):
    progress = RankProgress(path)
    with pytest.raises(ValueError, match="no such"), progress.failing():
        raise ValueError("no such data")
    first = read_progress(path)
    assert (first.state, first.message) == ("failed", "no such data")
    time.sleep(0.02)
    with pytest.raises(Stopped), progress.failing():
        raise Stopped(signal.SIGTERM)
    assert read_progress(path).message == ""  # standard error has it
    with pytest.raises(typer.Exit), progress.ending():
        raise typer.Exit(2)
    last = read_progress(path)
    assert (last.state, last.message, last.changed_s) == ("failed", "", first.changed_s)
    progress.note(step=1, position=0, action="0F0", num_actions=1)
    progress.failed(ValueError("another"))
    assert read_progress(path).changed_s > first.changed_s


def test_the_report_of_a_killed_rank():
    ends = [
        end(0, 1, state="peer_lost", message="waiting for 0SEND_ACT0.3 from rank 1: closed"),
        end(1, -signal.SIGKILL),
        end(2, -signal.SIGTERM, state="running", stopped=True),
        end(3, 0, state="done"),
        end(4, -signal.SIGTERM, state=None, stopped=True),
    ]
    lines = failure_report(ends, first=ends[1], asked=[]).splitlines()
    assert lines == [
        "error: rank 1 of 5 was killed by SIGKILL, which is also what a system short of memory "
        "sends, at step 3, action 7 of 40 (0F2)",
        "  rank 0 lost another rank at step 3, action 7 of 40 (0F2): waiting for 0SEND_ACT0.3 "
        "from rank 1: closed",
        "  rank 2 was running at step 3, action 7 of 40 (0F2), for 10 s",
        "  rank 3 ended well",
        "  rank 4 was ended after that before it could say anything",
    ]


def test_a_message_that_nobody_saw_is_shown_in_one_line():
    ends = [end(0, 1, state="failed", message="first\nsecond")]
    report = failure_report(ends, first=ends[0], asked=[])
    assert report.splitlines()[1:] == ["  first"]
