"""Tables of docs/results.md have the figures of the measured result files."""

import json
from statistics import median

import pytest

from tests.documents import ROOT

TEXT = (ROOT / "docs/results.md").read_text()
MIB = 2**20


def _file(name):
    return json.loads((ROOT / f"docs/results/{name}.json").read_text())


def _by_side(name):
    return {(m["side"], m["length_tokens"]): m for m in _file(name)["measurements"]}


@pytest.mark.parametrize("length", [8192, 16384, 32768, 65536])
def test_long_sequences_beside_transformers(length):
    measured = _by_side("compare_cpu_growth")
    ours = measured["sppo keep_attention", length]
    theirs = measured["transformers checkpointing", length]
    cells = [f"{length // 1024}Ki"]
    for side in (ours, theirs):
        cells += [f"{side['step_s']:.1f} s", f"{side['peak_bytes'] / MIB:.0f} MiB"]
    cells += [f"{ours[key] / theirs[key]:.2f}x" for key in ("step_s", "peak_bytes")]
    assert f"| {' | '.join(cells)} |" in TEXT


@pytest.mark.parametrize(
    "side",
    [
        "sppo keep_attention",
        "sppo looped",
        "sppo disk",
        "sppo looped disk",
        "transformers checkpointing",
    ],
)
def test_stages_on_one_rank(side):
    measured = _by_side("compare_looped")
    cells = [f"{measured[side, length]['peak_bytes'] / MIB:.0f} MiB" for length in (8192, 16384)]
    assert f" | {' | '.join(cells)} |" in TEXT
    for length in (8192, 16384):
        ours = measured["sppo keep_attention", length]["loss"]
        if side.startswith("sppo"):
            assert measured[side, length]["loss"] == ours


@pytest.mark.parametrize("way", _file("looped_memory")["memory_bytes"])
def test_memory_of_long_sequences(way):
    by_length = _file("looped_memory")["memory_bytes"][way]
    cells = [
        f"{memory['all']['predicted'] / MIB:.0f} MiB, {memory['all']['measured'] / MIB:.0f} MiB"
        for memory in by_length.values()
    ]
    assert f" | {' | '.join(cells)} |" in TEXT


@pytest.mark.parametrize("case", _file("check_prediction_cpu")["cases"], ids=lambda c: c["case"])
def test_predictions(case):
    step = {
        key: sum(pair[key] for pair in case["phases_s"].values())
        for key in ("predicted", "measured")
    }
    memory = case["memory_bytes"]["all"]
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| {case['case']} "))
    cells = [f"{value:.2f} s" for value in step.values()]
    cells += [f"{memory[key] / MIB:.0f} MiB" for key in ("predicted", "measured")]
    assert row.endswith(f"| {' | '.join(cells)} |")
    assert abs(memory["measured"] / memory["predicted"] - 1) < 0.04


@pytest.mark.parametrize("side", ["recompute_all", "recompute_uniform", "checkpointing", "levels"])
def test_levels(side):
    report = _file("compare_levels")
    measured, base = report["measured"][side], report["measured"]["recompute_all"]
    simulated = [
        sides[side]["tokens_per_s"] / sides["recompute_all"]["tokens_per_s"]
        for sides in report["simulated"].values()
    ]
    over = measured["tokens_per_s"] / base["tokens_per_s"]
    cells = [f"{measured['tokens_per_s']:.0f}, {over:.2f}x", f"{simulated[0]:.2f}x"]
    cells.append(f"{max(measured['peak_bytes']) / MIB:.0f} MiB")
    cells += [f"{gain:.2f}x" for gain in simulated[1:]]
    assert f" | {' | '.join(cells)} |" in TEXT


def test_stages_on_a_rank():
    for order in _file("compare_virtual_stages")["orders"]:
        cells = [
            f"{order['virtual_stages']}",
            f"{order['idle_share']:.1%}",
            f"{order['planned_idle_share']:.1%}",
            f"{order['step_s']:.1f} s, {order['over_one']:.2f}x",
            f"{order['simulated_over_one']:.2f}x",
        ]
        assert f"| {' | '.join(cells)} |" in TEXT


def test_state_on_a_disk():
    report = _file("compare_state_tiers")
    sides = report["sides"]
    for side in sides.values():
        cells = [f"{side[part] / MIB:.1f} MiB" for part in ("weights", "gradients", "optimizer")]
        assert f" | {' | '.join(cells)} | {side['all'] / MIB:.1f} MiB" in TEXT
    times = sides["on a disk"]["step_s"] / sides["in memory"]["step_s"]
    assert f"{sides['on a disk']['step_s']:.1f} s, {times:.2f}x |" in TEXT


def test_samples_beside_rows():
    report = _file("compare_samples")
    assert f"isolated: {report['ratio']:.2f}x the tokens per second" in TEXT
    assert report["num_samples"] == 100_000


LAYOUTS = ("paper", "own")


def _simulated_beside_infinipipe():
    """Cases of the same model, lengths and longest sample, by layout."""
    found = {}
    for case in _file("compare_infinipipe")["cases"]:
        key = case["model"], case["distribution"], case["longest"]
        found.setdefault(key, {})[case["layout"]] = case
    return found


def _infinipipe_row(key, layouts):
    """The row of a case in the table beside InfiniPipe's figures."""
    model, distribution, longest = key
    sides = layouts["paper"]["sides"]
    elastic = sides["elastic"]
    baselines = [sides[name] for name in ("fixed", "fixed_uniform")]
    baseline = max((side for side in baselines if side["fits"]), key=lambda s: s["tokens_per_s"])
    cells = [f"{model.upper()}, {distribution}, {longest // 1024}Ki"]
    cells += [f"{layouts[name]['sides']['elastic']['over_seq1f1b']:.2f}x" for name in LAYOUTS]
    cells += [f"{side['bubble_fraction']:.1%}" for side in (baseline, elastic)]
    cells.append(f"{elastic['time_deviation']:.1%}, {elastic['length_deviation']:.1%}")
    for name in ("unbalanced", "retained", "recomputed"):
        fits = sides[name]["fits"]
        share = sides[name]["tokens_per_s"] / elastic["tokens_per_s"] if fits else 0
        cells.append(f"{share:.2f}x" if fits else "does not fit")
    cells.append(f"{elastic['planning_s']:.1f} s")
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize(("key", "layouts"), _simulated_beside_infinipipe().items(), ids=str)
def test_documents_on_infinipipes_machine(key, layouts):
    assert _infinipipe_row(key, layouts) in TEXT
    for case in layouts.values():
        assert case["sides"]["elastic"]["bubble_fraction"] < 0.2


PACKINGS = {
    "stream": "rows of the stream",
    "fixed": "fixed chunks",
    "elastic": "planned chunks",
    "elastic_auto": "planned chunks, schedule and stages",
}
"""Names of the sides of ``compare_elastic.py`` in the text."""


@pytest.mark.parametrize("side", PACKINGS)
def test_packings_of_documents(side):
    report = _file("compare_elastic_32")
    measured = report["measured"][side]
    cells = [
        PACKINGS[side],
        f"{measured['tokens_per_s']:.0f}, {measured['over_fixed']:.2f}x",
        f"{_file('compare_elastic_32_first')['measured'][side]['over_fixed']:.2f}x",
        f"{measured['idle_share']:.1%}",
        f"{max(measured['peak_bytes']) / MIB:.0f} MiB",
        *(f"{report['simulated'][ranks][side]['over_fixed']:.2f}x" for ranks in "248"),
    ]
    assert f"| {' | '.join(cells)} |" in TEXT


@pytest.mark.parametrize("side", PACKINGS)
def test_where_the_time_of_documents_goes(side):
    measured = _file("compare_elastic_32")["measured"][side]
    seconds = (
        sum(measured["predicted_compute_s"]),
        sum(measured["median_compute_s"]),
        sum(map(median, measured["all_own_compute_s"])),
        sum(measured["step_s"]),
    )
    assert f"| {PACKINGS[side]} | {' | '.join(f'{s:.2f}' for s in seconds)} |" in TEXT


def _turns(report, side):
    """Seconds of all steps in each turn."""
    return map(sum, zip(*report["measured"][side]["all_step_s"], strict=True))


def _gains(reports, *, over):
    """How many times as fast as another side the planned steps are, in every turn."""
    return [
        other / own
        for report in reports
        for own, other in zip(_turns(report, "elastic_auto"), _turns(report, over), strict=True)
    ]


@pytest.mark.parametrize(
    ("samples", "names"),
    [
        (32, ["compare_elastic_32", "compare_elastic_32_first"]),
        (64, ["compare_elastic_64"]),
        (128, ["compare_elastic"]),
    ],
)
def test_more_documents_in_a_step(samples, names):
    reports = [_file(name) for name in names]
    measured, simulated = (reports[0][kind] for kind in ("measured", "simulated"))
    of_fixed, of_stream = (_gains(reports, over=side) for side in ("fixed", "stream"))
    peaks = [max(measured[side]["peak_bytes"]) / MIB for side in ("elastic_auto", "fixed")]
    gains = [simulated[ranks]["elastic_auto"]["over_fixed"] for ranks in "248"]
    cells = [
        f"{samples}",
        f"{measured['fixed']['idle_share']:.1%}",
        f"{gains[0]:.2f}x",
        f"{median(of_fixed):.2f}x",
        f"{min(of_fixed):.2f}x–{max(of_fixed):.2f}x",
        f"{median(of_stream):.2f}x",
        f"{peaks[0]:.0f} of {peaks[1]:.0f} MiB",
        f"{gains[1]:.2f}x, {gains[2]:.2f}x",
    ]
    assert f"| {' | '.join(cells)} |" in TEXT


PHASES = ("forward", "backward", "data and update")


@pytest.mark.parametrize("index", range(10))
def test_ten_random_runs(index):
    second, first = (
        _file(name)["cases"][index]
        for name in ("check_prediction_random", "check_prediction_random_first")
    )
    assert first["case"] == second["case"]
    (predicted, measured), before = (
        [
            sum(case["phases_s"][phase][kind] for phase in PHASES)
            for kind in ("predicted", "measured")
        ]
        for case in (second, first)
    )
    working = second["memory_bytes"]["working set"]
    cells = [
        second["case"],
        f"{predicted:.2f} s",
        f"{measured:.2f} s",
        f"{predicted / measured - 1:+.1%}",
        f"{before[0] / before[1] - 1:+.1%}",
        *(f"{working[kind] / MIB:.2f} MiB" for kind in ("predicted", "measured")),
    ]
    assert f"| {' | '.join(cells)} |" in TEXT


@pytest.mark.parametrize("row", _file("solve_seconds")["requests"], ids=lambda row: row["request"])
def test_time_of_the_solver(row):
    seconds = [turn["processor_s"] for turn in row["turns"]]
    cells = [
        row["request"],
        f"{median(seconds):.1f} s",
        f"{min(seconds):.1f} to {max(seconds):.1f} s",
        f"{row['at_full_speed_s']:.1f} s",
    ]
    assert f"| {' | '.join(cells)} |" in TEXT
