"""Golden programs: schedules with random shapes and costs, as text, and their simulated times.

This module alone calls :mod:`sppo.schedule`. A refactor that changes its interface adapts
:func:`answer` and the classes of the costs, and leaves what is drawn as it is.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from sppo.schedule.costs import CopyEngines, Costs, LayerCopies, Link, Links
from sppo.schedule.program import generate, lower
from sppo.schedule.program_text import format_program
from sppo.schedule.simulation.simulate import simulate

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "seq1f1b",
    "interleaved_seq1f1b",
    "looped_bfs",
    "zb_h1",
    "seq_zb_h1",
    "sppo",
    "sppo_msp",
)
WITH_VIRTUAL_STAGES = ("interleaved_1f1b", "interleaved_seq1f1b", "looped_bfs", "sppo_msp")
WHOLE_SEQUENCES = ("1f1b", "interleaved_1f1b", "zb_h1")
"""These names stand here once more, because another schedule would change all that is drawn."""
_WITH_TEXT = 9
"""Of every so many programs one is kept as text beside its digest."""


def digest(text: str) -> str:
    """Return the first letters of the SHA-256 of a program's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def answer(seed: str) -> dict[str, Any] | None:
    """Return the program of a seed, its times and memory; None if no schedule can be made of it."""
    dice = np.random.default_rng(int(seed))
    name = SCHEDULES[int(seed) % len(SCHEDULES)]
    ranks = int(dice.integers(1, 6))
    virtual = int(dice.integers(1, 4)) if name in WITH_VIRTUAL_STAGES else 1
    most = 1 if name in WHOLE_SEQUENCES else 7
    sequences = int(dice.integers(1, 4)) * (ranks if most == 1 else 1)
    alike = int(dice.integers(1, most + 1)) if dice.random() < 0.5 else 0
    counts = [alike or int(dice.integers(1, most + 1)) for _ in range(sequences)]
    lengths = [dice.integers(4, 40, count).tolist() for count in counts]
    costs = _drawn_costs(dice, stages=ranks * virtual, units=sum(counts), name=name)
    shape: dict[str, Any] = {"num_ranks": ranks, "num_virtual": virtual, "lengths": lengths}
    try:
        program = lower(generate(name, **shape, costs=costs), costs=costs)
    except ValueError:
        return None
    text, timeline = format_program(program), simulate(program, costs=costs)
    found = {
        "schedule": name,
        **shape,
        "program": digest(text),
        "step_s": timeline.makespan_s,
        "idle_s": [track.idle_s() for track in timeline.ranks],
        "peak_bytes": [track.memory["total"].peak_bytes for track in timeline.ranks],
    }
    return found if int(seed) % _WITH_TEXT else found | {"text": text.splitlines()}


def _drawn_costs(dice: np.random.Generator, *, stages: int, units: int, name: str) -> Costs:
    """Return random costs, in which copies, recomputation and streaming take part or do not."""

    def table(*shape: int, share: float = 1.0) -> Any:
        return dice.uniform(0.5, 2.0, shape) * (dice.random(shape) < share)

    def chance(share: float) -> bool:
        return bool(dice.random() < share)

    both = (stages, units)
    saved = table(*both)
    offloaded_kv, recomputed_kv = kv = np.zeros((2, *both))
    if chance(0.3):
        kv[int(chance(0.5)), dice.random(stages) < 0.5] = table(units)
    moved = 0.6 * chance(0.5) + 0.4 * chance(0.3)
    latencies, rates = dice.uniform(0, 0.5, stages).tolist(), dice.uniform(1, 9, stages).tolist()
    between = {(s, s + 1): Link(latencies[s], rates[s]) for s in range(stages) if chance(0.5)}
    engines = CopyEngines(*dice.uniform(0.5, 4.0, 2).tolist())
    by_layer = chance(0.3) and name != "sppo_msp"
    return Costs(
        forward_s=table(*both),
        backward_s=2 * table(*both),
        weight_s=table(*both),
        reduce_s=2 * table(stages, share=0.5),
        last_reduction_wait_s=table(stages, share=0.5) * chance(0.3),
        message_bytes=table(units),
        activation_bytes=saved,
        offload_bytes=saved * table(*both, share=moved) / 2,
        kv_offload_bytes=offloaded_kv,
        kv_recompute_s=recomputed_kv,
        operand_bytes=table(*both),
        kv_bytes=2 * table(*both),
        passing_kv_bytes=np.zeros(both),
        kv_gradient_bytes=table(*both),
        weight_bytes=table(stages),
        weight_gradient_bytes=table(stages),
        streamed_weight_bytes=table(stages) * chance(0.2),
        streamed_gradient_bytes=table(stages) * chance(0.2),
        links=Links(Link(latencies[0], rates[0]), between),
        copies=engines,
        state_copies=engines if chance(0.3) else None,
        layer_copies=(LayerCopies(layers=4, out=2, back=1),) * stages if by_layer else (),
    )
