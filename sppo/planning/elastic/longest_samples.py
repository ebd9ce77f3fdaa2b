"""Stand-in for a run of samples, with which the run is planned before its steps are known."""

from __future__ import annotations

from sppo.config.run import RunConfig

_OVERLAPPING = 2
"""Sequences that overlap in a pipeline: one in backward, the next in forward."""


def run_of_longest_samples(run: RunConfig, *, longest: int | None = None) -> RunConfig:
    """Return a run of fixed sequences that are as long as the longest samples.

    A step has one such sequence per replica, or two if pipeline ranks overlap them. Steps of many
    samples may need more memory. A run of the token stream is returned unchanged.

    Args:
        run: Validated run configuration.
        longest: Tokens of the longest sample; None for the longest that the run allows.
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
            # MSP does not cut subsequences of many samples.
            "parallel": parallel.model_copy(update={"multiplexed": "off"}),
        }
    )
