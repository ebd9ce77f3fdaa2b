"""Numbers of a timeline, as printed by `sppo simulate --json` and shown in its table."""

from __future__ import annotations

from sppo.schedule.timeline import Timeline


def timeline_report(timeline: Timeline) -> dict[str, object]:
    """Return the numbers of one step, ready for JSON. Lists are per rank.

    * program_digest: digest of all programs, `Schedule.digest`.
    * makespan_s: length of the step.
    * bubble_fraction: idle time of all ranks over num_ranks * makespan_s, whatever the cause.
    * bubble_ratio: idle time over busy time, the papers' (p - 1) / N.
    * peak_in_flight: most units at once between F and the end of their backward.
    * idle_s and its three parts: bubble_s (input not computed yet, or no work left),
      exposed_communication_s (input computed and in flight, or gradients being reduced),
      exposed_copy_s (activations not back from the host).
    * device_peak_bytes: peak of activations, K/V and dK/dV of the units; per bucket in
      device_peak_bytes_by_bucket. Weights and optimizer states are not part of a schedule.
    """
    ranks = timeline.ranks
    buckets = sorted({name for track in ranks for name in track.memory} - {"total"})

    def peaks(bucket: str) -> list[float]:
        return [
            _plain(track.memory[bucket].peak_bytes) if bucket in track.memory else 0
            for track in ranks
        ]

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
        "device_peak_bytes": peaks("total"),
        "device_peak_bytes_by_bucket": {bucket: peaks(bucket) for bucket in buckets},
    }


def _plain(value: float) -> float | int:
    """Return `value` as an integer if it is whole, as counts of units usually are."""
    return int(value) if value == int(value) else value
