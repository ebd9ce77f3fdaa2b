"""Report of ``sppo estimate``: memory by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from sppo.cli.output.candidate import (
    degrees_json,
    hardware_json,
    policy_text,
    shortfall_json,
    stages_json,
)
from sppo.cli.output.memory import host_memory_text, print_memory
from sppo.cli.output.printing import say, table
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.estimate import SECTION_5_1_BYTES, TABLE_2_BYTES, Estimate
from sppo.planning.why_nothing_fits import run_line
from sppo.units import GIB, format_bytes


@dataclass(frozen=True, slots=True)
class EstimateReport:
    """Report of the predicted memory of a run.

    Attributes:
        found: Estimate of the run.
    """

    found: Estimate

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        found, evaluated = self.found, self.found.evaluated
        candidate = evaluated.candidate
        return {
            "fits": evaluated.shortfall is None,
            "shortfall": shortfall_json(evaluated.shortfall),
            **degrees_json(evaluated.degrees),
            "chosen_by_solve": list(found.chosen),
            "num_subsequences": len(candidate.lengths),
            "subsequence_lengths": list(candidate.lengths),
            "schedule": candidate.schedule,
            "virtual_stages": candidate.virtual_stages,
            "policy": evaluated.effective_policy,
            "kv": evaluated.kv,
            "state": asdict(candidate.state),
            "device_peak_bytes": evaluated.device_peak_bytes,
            "host_peak_bytes": evaluated.host_peak_bytes,
            "node_host_peak_bytes": evaluated.node_host_bytes,
            "model": {**asdict(found.counts), "state_bytes": found.counts.state_bytes},
            "stages": stages_json(evaluated),
            "hardware": hardware_json(found.hardware),
        }

    def show(self, console: Console) -> None:
        """Print the model, the bytes of one sequence, and the memory of every stage of the run."""
        found, evaluated = self.found, self.found.evaluated
        say(console, run_line(found.run), f"on {hardware_line(found.hardware)}")
        headings = ["one sequence, all devices", "", "a token and layer"]
        console.print(table(headings, _count_rows(found)))
        say(console, *_plan_lines(found))
        if evaluated.node_host_bytes:
            host, node = evaluated.host_peak_bytes, evaluated.node_host_bytes
            say(console, host_memory_text(host, node_bytes=node))
        console.print()
        print_memory(evaluated, console=console)


def _plan_lines(found: Estimate) -> Iterator[str]:
    """Yield lines about the plan of the run, and whether it fits."""
    evaluated, candidate = found.evaluated, found.evaluated.candidate
    schedule = candidate.schedule
    if candidate.virtual_stages > 1:
        schedule += f" with {candidate.virtual_stages} stages on a rank"
    yield (
        f"{'as solve chooses' if found.chosen else 'as it stands'}: {evaluated.degrees.text()}, "
        f"N={len(candidate.lengths)}, schedule {schedule}, policy {evaluated.effective_policy}: "
        f"{policy_text(evaluated)}"
    )
    if found.chosen:
        yield f"chosen by solve: {', '.join(found.chosen)}"
    if evaluated.shortfall is None:
        yield "fits"
    else:
        yield f"does not fit: {evaluated.shortfall.reason}"
        yield "sppo solve says what would"


def _count_rows(found: Estimate) -> list[Sequence[str] | None]:
    """Return rows of model states, and of one sequence's activations by several counts."""
    counts, model = found.counts, found.run.model
    per_layer_token = found.run.sequence.length * model.num_layers
    states = f"{counts.state_bytes_per_parameter} B a parameter"
    activations = {
        f"activations, paper Table 2 ({TABLE_2_BYTES} S H L)": counts.table_2_bytes,
        f"activations, paper §5.1 ({SECTION_5_1_BYTES} S H L)": counts.section_5_1_bytes,
        **{f"activations, here: {policy}": held for policy, held in counts.saved_bytes.items()},
        _kv_name(found): counts.kv_bytes,
        "dK and dV in fp32": counts.kv_gradients_bytes,
    }
    return [
        ["model states", _gib(counts.state_bytes), states],
        None,
        *(
            [name, _gib(held), f"{held / per_layer_token:,.0f} B"]
            for name, held in activations.items()
        ),
    ]


def _gib(amount: int) -> str:
    """Format bytes in GiB, however many, as the tables of the SPPO paper do."""
    return f"{amount / GIB:,.1f} GiB" if amount >= GIB else format_bytes(amount)


def _kv_name(found: Estimate) -> str:
    """Return the row name of K and V, with the share that grouped queries leave of them."""
    counts, model = found.counts, found.run.model
    if counts.kv_bytes == counts.multi_head_kv_bytes:
        return "K and V"
    return f"K and V, {model.kv_heads} heads for {model.num_heads} (1/{model.group_size})"
