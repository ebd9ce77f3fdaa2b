"""Names of schedules, what each does, and which of them share a property."""

from __future__ import annotations

from collections.abc import Mapping

from sppo.config.run import WITH_VIRTUAL_STAGES as WITH_VIRTUAL_STAGES

DESCRIPTIONS: Mapping[str, str] = {
    "gpipe": "All forwards, then all backwards (GPipe).",
    "1f1b": "One forward, one backward in turn after a warm-up, of whole sequences "
    "(PipeDream-Flush, Megatron-LM).",
    "interleaved_1f1b": "The same with several stages on a rank, between which it changes "
    "(Megatron-LM).",
    "seq1f1b": "One forward, one backward in turn, of subsequences (Seq1F1B).",
    "interleaved_seq1f1b": "The same with several stages on a rank, for any number of "
    "subsequences.",
    "looped_bfs": "All units of a sequence pass one stage of every rank before the next one; "
    "backward takes the stages in reverse (Breadth-First Pipeline Parallelism).",
    "zb_h1": "1F1B with the gradients of weights put off by one backward a rank (Zero Bubble).",
    "seq_zb_h1": "The same of subsequences.",
    "sppo": "Seq1F1B; a single rank runs sequence after sequence, with K and V of one (SPPO).",
    "sppo_msp": "The same, with the units next to bubbles cut once more over the ranks that would "
    "idle (SPPO, section 6); with several stages on a rank the same of looped_bfs.",
}
"""Descriptions of the schedules, by name, with their sources."""
# Schedules that run the weight half of a backward as an action of its own.
DEFERRING_WEIGHTS = ("zb_h1", "seq_zb_h1")
LOOPED = "looped_bfs"
"""Schedule in which a group of sequences passes one stage of a rank before the next stage, and
ends before the next group begins."""
# Schedules of whole sequences, each with its equivalent over subsequences.
WHOLE_SEQUENCES = {
    "1f1b": "seq1f1b",
    "interleaved_1f1b": "interleaved_seq1f1b",
    "zb_h1": "seq_zb_h1",
}


def schedule_names() -> tuple[str, ...]:
    """Return the schedule names that `generate` accepts."""
    return tuple(DESCRIPTIONS)


def order_of(name: str, *, num_virtual: int) -> str:
    """Return the schedule that gives the order of `name` before any unit is cut (MSP)."""
    if name != "sppo_msp":
        return name
    return "sppo" if num_virtual == 1 else LOOPED
