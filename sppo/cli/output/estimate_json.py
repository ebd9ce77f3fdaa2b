"""JSON report of ``sppo estimate --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sppo.cli.output.solve_json import (
    degrees_report,
    hardware_report,
    shortfall_report,
    stage_reports,
)
from sppo.planning.baselines import Baseline
from sppo.planning.estimate import Estimate, ModelCounts
from sppo.planning.search.choices import Degrees

if TYPE_CHECKING:
    from sppo.dry_run.traced_step import TracedStep


def estimate_report(found: Estimate, *, baselines: Sequence[Baseline] = ()) -> dict[str, Any]:
    """Return an estimate as JSON values."""
    candidate, evaluated = found.evaluated.candidate, found.evaluated
    report: dict[str, Any] = {
        "fits": evaluated.shortfall is None,
        "shortfall": shortfall_report(evaluated.shortfall),
        **degrees_report(Degrees.of_candidate(candidate)),
        "chosen_by_solve": list(found.chosen),
        "num_subsequences": len(candidate.lengths),
        "subsequence_lengths": list(candidate.lengths),
        "schedule": candidate.schedule,
        "virtual_stages": candidate.virtual_stages,
        "policy": evaluated.effective_policy,
        "kv": evaluated.kv,
        "state": asdict(evaluated.candidate.state),
        "device_peak_bytes": evaluated.device_peak_bytes,
        "host_peak_bytes": evaluated.host_peak_bytes,
        "node_host_peak_bytes": evaluated.node_host_bytes,
        "model": _counts_report(found.counts),
        "stages": stage_reports(evaluated),
        "hardware": hardware_report(found.hardware),
    }
    if baselines:
        report["baselines"] = [_baseline_report(row) for row in baselines]
    return report


def trace_report(traced: TracedStep) -> dict[str, Any]:
    """Return a traced step as JSON values."""
    return {
        "rank": traced.rank,
        "num_layers": traced.num_layers,
        "traced_layers": list(traced.traced_layers) or [traced.num_layers],
        "buckets": {
            name: {"predicted_bytes": predicted, "traced_bytes": held}
            for name, (predicted, held) in traced.buckets.items()
        },
        "fullest": traced.fullest._asdict(),
        "traced_fullest": [moment._asdict() for moment in traced.traced_fullest],
        "actions": {kind: asdict(counts) for kind, counts in traced.actions.items()},
        "host_waits": dict(traced.host_waits),
        "launches": dict(traced.kernels),
        "attention_backend": traced.backend,
        "streams": traced.num_streams,
        "seconds": traced.seconds,
    }


def _counts_report(counts: ModelCounts) -> dict[str, Any]:
    values = asdict(counts)
    values["state_bytes"] = counts.state_bytes
    return values


def _baseline_report(row: Baseline) -> dict[str, Any]:
    return {
        "method": row.method,
        "longest_tokens": row.longest_tokens,
        "degrees": None if row.degrees is None else degrees_report(row.degrees),
        "largest_bucket": row.largest_bucket,
        "step_s": row.step_s,
        "tokens_per_s_per_gpu": row.tokens_per_s_per_gpu,
        "paper": row.paper or None,
    }
