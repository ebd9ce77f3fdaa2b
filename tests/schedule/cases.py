"""Short ways to make and time schedules, for the tests of this folder."""

from __future__ import annotations

from sppo.schedule.costs import Link, Links, abstract_costs
from sppo.schedule.program import forward_part, generate
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.timeline import Timeline

SUBSEQUENCE_SCHEDULES = (
    "gpipe",
    "seq1f1b",
    "interleaved_seq1f1b",
    "looped_bfs",
    "seq_zb_h1",
    "sppo",
    "sppo_msp",
)


def make(name, *, p, n, m, v=1, tokens=16, forward_only=False, **rest) -> Schedule:
    made = generate(name, num_ranks=p, num_virtual=v, lengths=((tokens,) * n,) * m, **rest)
    return forward_part(made) if forward_only else made


def play(schedule: Schedule, *, f=1.0, b=2.0, w=0.0, factors=None, latency=0.0) -> Timeline:
    costs = abstract_costs(
        schedule.num_stages,
        num_units=schedule.num_units,
        forward_s=f,
        backward_s=b,
        weight_s=w,
        unit_factors=factors,
        links=Links(Link(latency_s=latency)),
    )
    return simulate(schedule, costs=costs)


def idle(timeline: Timeline) -> list[float]:
    return [track.idle_s() for track in timeline.ranks]


def in_flight(timeline: Timeline) -> list[float]:
    return [track.peak_in_flight for track in timeline.ranks]


def peaks(timeline: Timeline, bucket: str = "total") -> list[float]:
    return [track.memory[bucket].peak_bytes for track in timeline.ranks]
