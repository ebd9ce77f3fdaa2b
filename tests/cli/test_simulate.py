"""``sppo simulate`` from its flags to its output and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from sppo.cli.simulate import simulate

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(simulate)

SHAPE = ["--ranks", "4", "--sequences", "1", "--subsequences", "8"]


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def report(*words):
    return json.loads(run(*words, "--json").stdout)


def test_json_has_the_promised_keys_and_numbers():
    numbers = report("--schedule", "sppo", *SHAPE)
    assert numbers["makespan_s"] == 33
    assert numbers["forward_makespan_s"] == 11
    assert numbers["bubble_fraction"] == pytest.approx(9 / 33)
    assert numbers["peak_in_flight"] == [8, 8, 8, 8]
    assert numbers["idle_s"] == [9, 9, 9, 9]
    assert numbers["device_peak_bytes"] == [8, 8, 8, 8]
    assert numbers["exposed_copy_s"] == [0, 0, 0, 0]
    assert numbers["provenance"] == "simulated"


def test_msp_from_flags():
    free = report("--schedule", "sppo_msp", *SHAPE)
    assert free["makespan_s"] == pytest.approx(25)
    assert free["forward_makespan_s"] == pytest.approx(25 / 3)
    priced = ["--latency", "0.001", "--weight-size", "1", "--bandwidth"]
    paid = [
        report("--schedule", "sppo_msp", *SHAPE, *priced, b)["makespan_s"] for b in (50, 2, 0.1)
    ]
    # With a price the outermost units alone are tried too, and they do better than all of them.
    assert 24 < paid[0] < paid[1] < 33.1
    assert paid[2] == report("--schedule", "sppo", *SHAPE, "--latency", "0.001")["makespan_s"]


def test_the_offload_miniature_from_flags():
    shape = ["--schedule", "sppo", "--ranks", 1, "--sequences", 1, "--subsequences", 4]
    copies = ["--offload-ratio", "full", "--d2h", 2, "--h2d", 2]
    found = [
        (numbers["makespan_s"], numbers["device_peak_bytes"])
        for numbers in (
            report(*shape),
            report(*shape, "--offload-ratio", "full", "--keep-last", 1),
            report(*shape, *copies, "--keep-last", 1),
            report(*shape, *copies, "--keep-last", 2),
        )
    ]
    assert found == [(12, [4]), (12, [2]), (15, [3]), (12, [3])]


def test_figure_8_from_flags():
    shape = ["--schedule", "sppo", "--ranks", 2, "--sequences", 1, "--subsequences", 4]
    sizes = ["--unit-sizes", "3,2,1,1"]
    full = report(*shape, *sizes, "--offload-ratio", "full")
    adaptive = report(*shape, *sizes, "--offload-ratio", "adaptive")
    assert (full["makespan_s"], max(full["device_peak_bytes"])) == (21, 7)
    assert (adaptive["makespan_s"], max(adaptive["device_peak_bytes"])) == (15, 5)
    assert sum(adaptive["exposed_copy_s"]) == 0
    given = report(*shape, *sizes, "--offload-ratio", "1,0.5,0.25,0", "--keep-last", 0)
    assert max(given["device_peak_bytes"]) <= 7


def test_latency_hop_and_weight_flags():
    shape = ["--schedule", "1f1b", "--ranks", 2, "--sequences", 4, "--subsequences", 1]
    assert report(*shape, "--latency", 1)["makespan_s"] == 19
    assert report(*shape, "--latency", 1, "--hop", 2)["makespan_s"] == 17
    zb = ["--schedule", "zb_h1", "--ranks", 4, "--sequences", 8, "--subsequences", 1]
    assert report(*zb, "--backward", 1, "--weight", 1)["makespan_s"] == 27
    uneven = ["--schedule", "sppo", "--ranks", 3, "--sequences", 1, "--subsequences", 3]
    assert report(*uneven, "--unit-costs", "1,2,1")["makespan_s"] == 24


def test_evaluation_alone():
    numbers = report("--schedule", "sppo", *SHAPE, "--forward-only")
    assert numbers["makespan_s"] == numbers["forward_makespan_s"] == 11


@pytest.mark.parametrize("words", [["gpipe,sppo_msp"], ["gpipe", "sppo_msp"]])
def test_schedules_are_compared(words):
    numbers = report("--schedule", "sppo", *SHAPE, "--compare", *words)
    assert [(n["schedule"], round(n["makespan_s"], 6)) for n in numbers["compare"]] == [
        ("gpipe", 33),
        ("sppo_msp", 25),
    ]
    text = run("--schedule", "sppo", *SHAPE, "--compare", *words).stdout
    assert "0.76x" in text


def test_the_table_is_for_people():
    text = run("--schedule", "sppo", *SHAPE).stdout
    assert "sppo: 4 ranks, 4 stages, 1 sequence, 8 units (simulated)" in text
    assert "step 33 · forward alone 11 · idle 27.3%" in text
    many = run("--schedule", "sppo", "--ranks", 20, "--sequences", 1, "--subsequences", 2).stdout
    assert "and 4 more ranks; --json lists all of them" in many


def test_plots_are_written(tmp_path):
    png, trace = tmp_path / "t.png", tmp_path / "t.json"
    done = run("--schedule", "sppo", *SHAPE, "--png", png, "--trace", trace)
    assert done.stdout.endswith(f"written {png}\nwritten {trace}\n")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_a_program_can_be_written_edited_and_simulated(tmp_path):
    file = tmp_path / "program.txt"
    shape = ["--ranks", 2, "--sequences", 1, "--subsequences", 4]
    run("--schedule", "sppo", *shape, "--write-program", file)
    numbers = report("--program", file)
    assert numbers["makespan_s"] == 15
    assert numbers["forward_makespan_s"] == 5
    assert report("--program", file, "--latency", 1, "--backward", 1)["makespan_s"] == 12
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("1F0.1", "1F0.2", 1), encoding="utf-8")
    error = run("--program", file, code=2).stderr
    assert "program.txt, line 5: rank 1" in error
    assert "1F0.2 is there more than once (rule: coverage)" in error


def test_a_program_with_copies_is_offloaded(tmp_path):
    file = tmp_path / "program.txt"
    shape = ["--ranks", 1, "--sequences", 1, "--subsequences", 4]
    offload = ["--offload-ratio", "full", "--keep-last", 1]
    run("--schedule", "sppo", *shape, *offload, "--write-program", file)
    assert report("--program", file)["device_peak_bytes"] == [2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to simulate: give RUN.yaml or plan.json, or --schedule"),
        (["--schedule", "sppo"], "--schedule sppo needs --ranks, --sequences, --subsequences"),
        (["--schedule", "zbv", *SHAPE], "--schedule 'zbv': not one of gpipe, 1f1b"),
        (["--schedule", "1f1b", *SHAPE], "use seq1f1b, or 1 subsequence"),
        (
            ["--schedule", "sppo", *SHAPE, "--ranks", "0"],
            "--ranks 0: must be a whole number",
        ),
        (
            ["--schedule", "sppo", *SHAPE, "--forward", "-1"],
            "--forward -1: must be a finite",
        ),
        (["--schedule", "sppo", *SHAPE, "--h2d", "nan"], "--h2d nan: must be a finite number"),
        (["--schedule", "sppo", *SHAPE, "--d2h", "inf"], "--d2h inf: must be a finite number"),
        (["--schedule", "sppo", *SHAPE, "--keep-last", "-1"], "--keep-last -1: must be a whole"),
        (["--schedule", "sppo", *SHAPE, "--virtual", "0"], "--virtual 0: must be a whole number"),
        (["--schedule", "sppo", *SHAPE, "--prefetch", "x"], "--prefetch x: must be a whole number"),
        (["--schedule", "sppo", *SHAPE, "--ranks", "9" * 5000], "999: must be a whole number"),
        (
            ["--schedule", "sppo", *SHAPE, "--bandwidth", "0"],
            "--bandwidth 0: must be a finite number",
        ),
        (["--schedule", "sppo", *SHAPE, "--unit-costs", "1,x"], "write numbers with commas"),
        (["--schedule", "sppo", *SHAPE, "--unit-costs", "1,-2"], "every number must be finite"),
        (["--schedule", "sppo", *SHAPE, "--unit-costs", "1,2,3"], "3 unit costs for 8 units"),
        (["--schedule", "sppo", *SHAPE, "--offload-ratio", "1.5"], "within 0 and 1"),
        (
            ["--schedule", "sppo", *SHAPE, "--hop", "4"],
            "--hop 4: must be a whole number from 1",
        ),
        (["--schedule", "sppo", *SHAPE, "--virtual", "2"], "use one of interleaved_1f1b"),
        (["--schedule", "sppo", *SHAPE, "seq1f"], "'seq1f' is neither a run file"),
        (["--schedule", "sppo", *SHAPE, "--compare", "x"], "--compare 'x': not one of"),
        (["--schedule", "sppo", *SHAPE, "a.b=1"], "'a.b=1' changes a run file, but none"),
        (["a.yaml", "b.yaml"], "two files, a.yaml and b.yaml"),
        (["plan.json"], "plan.json: No such file"),
        (["missing.yaml"], "missing.yaml"),
        (["run.yaml", "--latency", "1"], "--latency sets an abstract cost"),
        (["--program", "missing.txt"], "missing.txt: No such file"),
        (["--program", "p.txt", "--ranks", "2"], "--ranks is the file's to say"),
        (["--program", "p.txt", "--compare", "gpipe"], "simulates the file alone"),
    ],
)
def test_a_wrong_request_ends_with_2_and_says_what_to_write(words, message):
    result = run(*words, code=2)
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_plot_that_cannot_be_written_ends_with_2(tmp_path):
    result = run("--schedule", "sppo", *SHAPE, "--png", tmp_path / "no" / "t.png", code=2)
    assert "there is no directory" in result.stderr


AXES = ("data", "pipeline", "sequence")
RUN = """
model: {preset: llama-3.2-1b}
data: {tokens: data}
sequence: {length: 64Ki, num_subsequences: 8}
hardware: {preset: a100-80g, nodes: 1}
"""


def test_a_run_file_with_the_costs_of_a_machine(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN, encoding="utf-8")
    alone = report(file, *(f"parallel.{name}_parallel_degree=1" for name in AXES))
    assert alone["num_ranks"] == 1
    assert alone["chosen_by_solve"] == []
    assert 0 < alone["bubble_fraction"] < 0.01  # the optimizer's step, in which no unit computes
    assert alone["hardware"] == "a100-80g (analytic)"
    four = report(file, "--ranks", 4, "--schedule", "sppo", "--compare", "sppo_msp", "1f1b")
    assert four["num_units"] == 8
    assert alone["makespan_s"] / 4 < four["makespan_s"] < alone["makespan_s"]
    msp, whole = four["compare"]
    assert msp["makespan_s"] <= four["makespan_s"]
    assert whole["num_units"] == 1
    left_out = report(file)
    assert left_out["num_devices"] == 8
    assert "parallel.sequence_parallel_degree" in left_out["chosen_by_solve"]
    assert left_out["makespan_s"] < alone["makespan_s"] / 4
    longer = report(file, "sequence.length=128Ki")
    assert longer["makespan_s"] > 2 * left_out["makespan_s"]
    text = run(file).stdout
    assert "costs of a100-80g (analytic)" in text
    assert "chosen by solve: parallel.data_parallel_degree" in text


def test_asking_for_help_loads_neither_numpy_nor_matplotlib():
    code = (
        "import sys, sppo.cli.simulate; "
        "print([m for m in ('numpy', 'matplotlib', 'torch', 'pydantic') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_ranks_divide_the_cpu_as_the_written_degree_does(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {preset: tiny}\n"
        "data: {tokens: data}\n"
        "sequence: {length: 16Ki, num_subsequences: 8}\n"
        "hardware: {preset: laptop-cpu}\n",
        encoding="utf-8",
    )
    written = report(file, "parallel.pipeline_parallel_degree=2")
    assert report(file, "--ranks", 2)["makespan_s"] == written["makespan_s"]
