import signal

import pytest

from sppo.parallel.failure_report import RankEnd, exit_code, failure_report, first_failure
from sppo.parallel.progress import ProgressNote, RankState


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
            pid=1,
            state=state,
            step=3,
            position=6,
            num_actions=40,
            action="0F2",
            changed_s=at_s,
            message=message,
        )
    return RankEnd(rank, returncode, ended_s, stopped, note, last_lines)


def test_all_well():
    assert first_failure([end(0, 0, state="done"), end(1, 0, state=None)]) is None


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


def test_a_rank_whose_earlier_wait_ran_out_does_not_take_the_blame():
    late = "meeting the other pieces of a unit: timed out before, and closed the connection then"
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
        "  rank 4 was killed by SIGTERM before it could say anything",
    ]


def test_the_report_of_a_rank_with_output():
    said = ("reading tokens", "error: no such data")
    ends = [end(0, 0), end(1, 2, state="failed", message="no such data", last_lines=said)]
    lines = failure_report(ends, first=ends[1], asked=["SIGTERM"]).splitlines()
    assert lines == [
        "error: after SIGTERM, rank 1 of 2 ended with exit code 2 at step 3, action 7 of 40 (0F2)",
        "  its last 2 lines of output:",
        "  | reading tokens",
        "  | error: no such data",
        "  rank 0 ended well",
    ]


def test_a_message_that_nobody_saw_is_shown_in_one_line():
    ends = [end(0, 1, state="failed", message="first\nsecond")]
    report = failure_report(ends, first=ends[0], asked=[])
    assert report.splitlines()[1:] == ["  first"]


def test_signals_without_a_name():
    ends = [end(0, -40)]
    assert "was killed by signal 40 at" in failure_report(ends, first=ends[0], asked=[])
