"""The run that a run of samples is planned as before its steps are known."""

from __future__ import annotations

from sppo.config.run import RunConfig

_OVERLAPPING = 2
"""Sequences of which a pipeline holds something at once: one in backward, the next in forward."""


def run_of_longest_samples(run: RunConfig, *, longest: int | None = None) -> RunConfig:
    """Return a run of fixed sequences that are as long as the longest samples.

    One such sequence for each replica, or two where pipeline ranks overlap them; steps of many
    samples may need more. A run of the token stream is returned as it is.

    Args:
        run: checked.
        longest: tokens of the longest sample there is; None: as many as the run allows.
    """
    if run.data.samples == "stream":
        return run
    parallel, length = run.parallel, run.sequence.length
    overlapping = _OVERLAPPING if parallel.pipeline_parallel_degree > 1 else 1
    sequence = {"length": min(length, longest or length)}
    train = {"sequences_per_step": overlapping * parallel.data_parallel_degree}
    return run.model_copy(
        update={
            "sequence": run.sequence.model_copy(update=sequence),
            "train": run.train.model_copy(update=train),
            # Subsequences of many samples are not cut over ranks.
            "parallel": parallel.model_copy(update={"multiplexed": "off"}),
        }
    )
