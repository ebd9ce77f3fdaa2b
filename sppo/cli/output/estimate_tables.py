"""Text output of ``sppo estimate``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from sppo.cli.output.host_memory import host_memory_text
from sppo.cli.output.memory_groups import bucket_text
from sppo.cli.output.memory_table import print_memory
from sppo.cli.output.solve_tables import run_line
from sppo.cli.output.solve_text import degrees_text, policy_text, schedule_text
from sppo.hardware.run_hardware import hardware_line
from sppo.planning.baselines import HOST, Baseline
from sppo.planning.estimate import SECTION_5_1_BYTES, TABLE_2_BYTES, Estimate
from sppo.planning.search.choices import Degrees
from sppo.report.lines import print_line
from sppo.units import GIB, format_bytes, format_tokens


def print_estimate(found: Estimate, *, console: Console) -> None:
    """Print the model, the bytes of one sequence, and the memory of every stage of the run."""

    def say(text: str) -> None:
        print_line(text, console)

    evaluated = found.evaluated
    candidate = evaluated.candidate
    degrees = Degrees.of_candidate(candidate)
    say(run_line(found.run))
    say(f"on {hardware_line(found.hardware)}")
    console.print(_counts_table(found))
    whose = "as solve chooses" if found.chosen else "as it stands"
    say(
        f"{whose}: {degrees_text(degrees)}, N={len(candidate.lengths)}, schedule "
        f"{schedule_text(candidate)}, policy {evaluated.effective_policy}: {policy_text(evaluated)}"
    )
    if found.chosen:
        say(f"chosen by solve: {', '.join(found.chosen)}")
    if evaluated.shortfall is None:
        say("fits")
    else:
        say(f"does not fit: {evaluated.shortfall.reason}")
        say("sppo solve says what would")
    if evaluated.node_host_bytes:
        say(host_memory_text(evaluated.host_peak_bytes, node_bytes=evaluated.node_host_bytes))
    console.print()
    print_memory(evaluated, console=console)


def _counts_table(found: Estimate) -> Table:
    """Return a table of model states, and of one sequence's activations by several counts."""
    counts, model = found.counts, found.run.model
    per_layer_token = found.run.sequence.length * model.num_layers
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("one sequence, all devices", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("a token and layer", justify="right", no_wrap=True)

    def add(name: str, amount: int, unit: str) -> None:
        table.add_row(name, _gib(amount), unit)

    def add_activations(name: str, amount: int) -> None:
        add(name, amount, f"{amount / per_layer_token:,.0f} B")

    states = f"{counts.state_bytes_per_parameter} B a parameter"
    add("model states", counts.state_bytes, states)
    table.add_section()
    add_activations(f"activations, paper Table 2 ({TABLE_2_BYTES} S H L)", counts.table_2_bytes)
    add_activations(
        f"activations, paper §5.1 ({SECTION_5_1_BYTES} S H L)", counts.section_5_1_bytes
    )
    for policy, amount in counts.saved_bytes.items():
        add_activations(f"activations, here: {policy}", amount)
    add_activations(_kv_name(found), counts.kv_bytes)
    add_activations("dK and dV in fp32", counts.kv_gradients_bytes)
    return table


def _gib(amount: int) -> str:
    """Format bytes in GiB, however many, as the tables of the SPPO paper do."""
    return f"{amount / GIB:,.1f} GiB" if amount >= GIB else format_bytes(amount)


def _kv_name(found: Estimate) -> str:
    """Return the row name of K and V, with the share that grouped queries leave of them."""
    counts, model = found.counts, found.run.model
    if counts.kv_bytes == counts.multi_head_kv_bytes:
        return "K and V"
    return f"K and V, {model.kv_heads} heads for {model.num_heads} (1/{model.group_size})"


def print_baselines(rows: Sequence[Baseline], *, length: int, console: Console) -> None:
    """Print the longest sequence of each baseline on these devices, and step times at a length."""
    claims = any(row.paper for row in rows)
    print_line(
        "longest sequence that fits on these devices (analytic)"
        + (", and in the SPPO paper" if claims else ""),
        console,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trained with", no_wrap=True)
    table.add_column("longest", justify="right", no_wrap=True)
    table.add_column("SP·PP·DP", no_wrap=True)
    table.add_column("ends for want of", no_wrap=True)
    if claims:
        table.add_column("paper", no_wrap=True)
    for row in rows:
        cells = [
            row.method,
            format_tokens(row.longest_tokens) if row.longest_tokens else "not 1Ki",
            "solver's" if row.degrees is None else _short_degrees(row.degrees),
            _bucket(row.largest_bucket),
        ]
        table.add_row(*cells, *([row.paper] if claims else []))
    console.print(table)
    _print_steps(rows, length=length, console=console)


def _print_steps(rows: Sequence[Baseline], *, length: int, console: Console) -> None:
    """Print the step time of each baseline at one length, if it fits."""
    print_line(f"a step on sequences of {format_tokens(length)} tokens", console)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trained with", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("tokens/s/GPU", justify="right", no_wrap=True)
    for row in rows:
        if row.step_s is None or row.tokens_per_s_per_gpu is None:
            table.add_row(row.method, "does not fit", "")
        else:
            table.add_row(row.method, f"{row.step_s:.1f} s", f"{row.tokens_per_s_per_gpu:.0f}")
    console.print(table)


def _short_degrees(degrees: Degrees) -> str:
    numbers = degrees.sequence_parallel, degrees.pipeline_parallel, degrees.data_parallel
    return "·".join(map(str, numbers))


def _bucket(name: str | None) -> str:
    """Return the name of the memory that a method runs out of; "" if there is none."""
    if name is None:
        return ""
    return "host memory" if name == HOST else bucket_text(name)
