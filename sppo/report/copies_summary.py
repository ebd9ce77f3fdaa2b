"""Summary of a run's copies, beside its plan."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sppo.offload.copy_report import CopyReport
from sppo.planning.plan import ExecutionPlan


def copies_summary(plan: ExecutionPlan, reports: Sequence[CopyReport]) -> dict[str, Any] | None:
    """Figures of one step for ``run_summary.json``; None for a plan that offloads nothing.

    Args:
        plan: that was run.
        reports: of every step of this process; rates and times are medians over them.
    """
    if not plan.offloads_anything or not reports:
        return None
    last, predicted, node = reports[-1], plan.predicted, plan.hardware.node
    host_bytes = plan.staging_bytes
    out, back = node.disk_write_bytes_per_s, node.disk_read_bytes_per_s
    if plan.tier == "host":
        out, back = node.d2h_bytes_per_s, node.h2d_bytes_per_s
        host_bytes = max(rank.tier_bytes for rank in plan.rank_memory)
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
