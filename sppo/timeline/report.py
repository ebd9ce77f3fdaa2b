"""A timeline in numbers: what `sppo simulate --json` prints and the table shows."""

from __future__ import annotations

from sppo.schedule.timeline import IdleCause, Timeline

_CAUSES: tuple[IdleCause, ...] = ("bubble", "communication", "copy")


def timeline_report(timeline: Timeline) -> dict[str, object]:
    """The numbers of one step, ready for JSON. Lists are per rank.

    * program_digest: of what every rank does, `Schedule.digest`.
    * makespan_s: length of the step.
    * bubble_fraction: idle time of all ranks over num_ranks * makespan_s, whatever the cause.
    * bubble_ratio: idle time over busy time, the papers' (p - 1) / N.
    * peak_in_flight: most units between F and the end of their backward.
    * idle_s and its three parts: bubble_s (input not computed yet, or nothing left),
      exposed_communication_s (computed and on its way), exposed_copy_s (not back from the host).
    * device_peak_bytes: activations, K/V and dK/dV of the units; bucket by bucket in
      device_peak_bytes_by_bucket. Weights and optimizer are not part of a schedule.
    """
    ranks = timeline.ranks
    buckets = sorted({name for track in ranks for name in track.memory} - {"total"})
    return {
        "schedule": timeline.schedule.name,
        "program_digest": timeline.schedule.digest(),
        "provenance": timeline.provenance,
        "num_ranks": len(ranks),
        "num_stages": timeline.schedule.num_stages,
        "num_sequences": timeline.schedule.num_sequences,
        "num_units": timeline.schedule.num_units,
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_ratio": timeline.bubble_ratio,
        "peak_in_flight": [_plain(track.peak_in_flight) for track in ranks],
        "idle_s": [track.idle_s() for track in ranks],
        "bubble_s": [track.idle_s("bubble") for track in ranks],
        "exposed_communication_s": [track.idle_s("communication") for track in ranks],
        "exposed_copy_s": [track.idle_s("copy") for track in ranks],
        "device_peak_bytes": [
            _plain(track.memory["total"].peak_bytes) if track.memory else 0 for track in ranks
        ],
        "device_peak_bytes_by_bucket": {
            name: [
                _plain(track.memory[name].peak_bytes) if name in track.memory else 0
                for track in ranks
            ]
            for name in buckets
        },
    }


def _plain(value: float) -> float | int:
    """Whole numbers without a fraction, as people count units."""
    return int(value) if value == int(value) else value
