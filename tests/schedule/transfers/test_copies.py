"""Offload in small examples: one rank, and Figure 8 of the paper."""

from __future__ import annotations

import numpy as np
import pytest

from sppo.schedule.abstract import AbstractCase, abstract_case
from sppo.schedule.actions import ActionKind
from sppo.schedule.checks import validate
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.transfers.copies import place_copies
from tests.schedule.cases import make, peaks


def offload(ranks=1, sizes=(1.0,), **how):
    schedule, costs = abstract_case(
        AbstractCase(
            schedule="sppo", ranks=ranks, sequences=1, subsequences=4, unit_sizes=sizes, **how
        )
    )
    return simulate(schedule, costs=costs)


@pytest.mark.parametrize(
    ("how", "makespan", "peak"),
    [
        ({"offload_ratio": "none"}, 12, 4),
        ({"offload_ratio": (1, 1, 1, 0)}, 12, 2),
        ({"offload_ratio": (1, 1, 1, 0), "d2h": 2, "h2d": 2}, 15, 3),
        ({"offload_ratio": (1, 1, 0, 0), "d2h": 2, "h2d": 2}, 12, 3),
    ],
)
def test_the_miniature_on_one_rank(how, makespan, peak):
    timeline = offload(**how)
    assert timeline.makespan_s == makespan
    assert peaks(timeline) == [peak]
    assert timeline.ranks[0].idle_s("copy") == makespan - 12


# Figure 8 prints neither unit sizes nor link speed. Ours: a FLOPs-balanced sequence whose
# subsequences leave 3, 2, 1 and 1 units on each of 2 stages, and a link that moves one unit per
# forward; F takes 1, B takes 2.
FIGURE_8 = {"ranks": 2, "sizes": (3.0, 2.0, 1.0, 1.0), "d2h": 1.0, "h2d": 1.0}


def test_figure_8_full_offload_over_a_slow_link_helps_nobody():
    timeline = offload(offload_ratio="full", **FIGURE_8)
    assert max(peaks(timeline)) == 7
    assert timeline.makespan_s == 21
    assert sum(track.idle_s("copy") for track in timeline.ranks) == 6


def test_figure_8_adaptive_offload_peaks_at_5_and_hides():
    plain, adaptive = (
        offload(offload_ratio="none", **FIGURE_8),
        offload(offload_ratio="adaptive", **FIGURE_8),
    )
    assert peaks(plain) == [7, 7]
    assert peaks(adaptive) == pytest.approx([5, 5])
    assert adaptive.makespan_s == plain.makespan_s == 15
    assert all(track.idle_s("copy") == 0 for track in adaptive.ranks)


@pytest.mark.parametrize("name", ["seq1f1b", "interleaved_seq1f1b", "seq_zb_h1", "sppo_msp"])
def test_copies_fit_every_schedule(name):
    schedule = make(name, p=3, v=2 if name.startswith("inter") else 1, n=4, m=2)
    everything = np.ones((schedule.num_stages, schedule.num_units), dtype=bool)
    placed = place_copies(schedule, offloaded=everything)
    validate(placed)
    kinds = [a.kind for program in placed.programs for a in program]
    assert kinds.count(ActionKind.D2H) == kinds.count(ActionKind.H2D) == kinds.count(ActionKind.F)


def test_shards_of_a_cut_unit_are_copied_by_the_ranks_that_hold_them():
    request = AbstractCase(schedule="sppo_msp", ranks=3, sequences=1, subsequences=6)
    kept = abstract_case(request)
    sent = abstract_case(
        request.model_copy(update={"offload_ratio": "full", "d2h": 0.4, "h2d": 0.4})
    )
    before, after = (simulate(schedule, costs=costs) for schedule, costs in (kept, sent))
    shards = [s for r in range(3) for s in after.spans(r) if s.lane == "d2h"]
    cut = [s for s in shards if s.action.num_shards == 3]
    assert cut
    assert all(s.finish_s - s.start_s == pytest.approx(0.4 / 3) for s in cut)
    assert max(peaks(after)) < 0.6 * max(peaks(before))
    assert before.makespan_s <= after.makespan_s < 1.1 * before.makespan_s
