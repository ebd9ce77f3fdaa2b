"""Summary of the copies of a run, measured and as planned."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sppo.cost.memory.tier_memory import SAVED_IN_BACKGROUND
from sppo.cost.stage_cost import copy_bytes_per_s
from sppo.offload.copy_report import CopyReport
from sppo.planning.plan import ExecutionPlan
from sppo.planning.plan_program import plan_candidate


def copies_summary(plan: ExecutionPlan, reports: Sequence[CopyReport]) -> dict[str, Any] | None:
    """Return the figures of one step's copies for ``run_summary.json``.

    Returns None if the plan offloads nothing, or no step was run.

    Args:
        plan: Plan of the run.
        reports: Report of each step of this process. Rates and times are medians over the steps,
            bytes those of the last step.
    """
    if not plan.offloads_anything or not reports:
        return None
    last, predicted = reports[-1], plan.predicted
    out, back = copy_bytes_per_s(plan_candidate(plan))
    host_bytes = max(
        sum(buckets.values()) - buckets[SAVED_IN_BACKGROUND]
        for buckets in plan.rank_tier_buckets("host")
    )
    return {
        "out_bytes": dict(last.out_bytes),
        "back_bytes": dict(last.back_bytes),
        "out_bytes_per_s": {
            "predicted": out,
            "measured": statistics.median(report.out_bytes_per_s for report in reports),
        },
        "back_bytes_per_s": {
            "predicted": back,
            "measured": statistics.median(report.back_bytes_per_s for report in reports),
        },
        "exposed_s": {
            "predicted": predicted.exposed_copy_s,
            "measured": statistics.median(report.exposed_s for report in reports),
        },
        "host_bytes": {"predicted": host_bytes, "measured": last.host_bytes},
        "disk_bytes": {"predicted": predicted.disk_peak_bytes, "measured": last.disk_bytes},
    }
