"""Degrees that a run file leaves out: chosen for the devices of the machine, or the ranks."""

import json
from math import prod

import pytest
import torch
from rich.console import Console

import sppo
from sppo.config import load_run
from sppo.hardware import this_machine
from sppo.parallel.job.job_end import JobEnd
from sppo.planning.search.choices import Degrees
from sppo.training import input_checks, start
from sppo.training.devices import device as devices
from sppo.training.devices.cuda_device import CudaDevice
from sppo.training.start import ReadyRun, on_devices, prepare_run, start_ranks
from sppo.units import GIB
from tests.conftest import write_run
from tests.training.devices.test_cuda_device import place

GPUS = ("NVIDIA H100 80GB HBM3", 4, 80 * GIB)
NAMES = ("data_parallel_degree", "pipeline_parallel_degree", "sequence_parallel_degree")
SMALL = {"model": {"preset": "tiny"}, "sequence": {"length": "16Ki"}}


@pytest.fixture
def gpus(monkeypatch):
    """A machine of four GPUs; none may be used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS[1])
    for module in (this_machine, start, input_checks):
        monkeypatch.setattr(module, "find_gpus", lambda: GPUS)
    monkeypatch.setattr(CudaDevice, "machine", lambda self: this_machine.detect_machine())


def degrees_of(plan_or_parallel):
    return {name: getattr(plan_or_parallel, name) for name in NAMES}


def chosen(run, environment=None):
    """Degrees chosen for a run; {} if there is nothing to choose."""
    return on_devices(ReadyRun(run, None, environment), Console(quiet=True)).chosen


def open_run(**overrides):
    sections = {"data": {"tokens": "tokens"}, **SMALL}
    return load_run(sections, {f"parallel.{name}": value for name, value in overrides.items()})


@pytest.mark.parametrize("written", [{}, {NAMES[2]: 1}])
def test_they_are_those_of_solve_for_this_machine(gpus, written):
    run = open_run(**written)
    found, plan = chosen(run), sppo.solve(run)
    assert not found.keys() & written.keys()
    assert {**found, **written} == degrees_of(plan)
    degrees = sppo.estimate(run).evaluated.degrees
    assert degrees == Degrees(*degrees_of(plan).values())


def test_what_only_one_rank_rules_out_may_be_asked_for(work, gpus):
    on = {"parallel": {"multiplexed": "on"}, "model": {"num_layers": 2}}
    run = load_run(write_run(work / "run.yaml", **on))
    assert input_checks.run_file_problems(run) == []
    one = load_run(run, {"parallel.pipeline_parallel_degree": 1})
    assert [problem.path for problem in input_checks.run_file_problems(one)] == [
        "parallel.multiplexed"
    ]


def test_one_rank_trains_if_asked_or_on_a_cpu(gpus, monkeypatch):
    assert chosen(open_run(**dict.fromkeys(NAMES, 1))) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen(open_run()) == {}


def test_a_launcher_gives_the_number_of_ranks(gpus):
    assert chosen(open_run(**{NAMES[1]: 2}), place(local_ranks=2)) == {}
    cluster = sppo.solve(load_run(open_run(), {"hardware.devices_per_node": 2}))
    assert chosen(open_run(), place(local_ranks=2)) == degrees_of(cluster)


def test_written_degrees_give_way_to_want_of_devices_if_the_run_may_shrink(gpus, monkeypatch):
    written = open_run(**{NAMES[1]: 8})
    assert chosen(written) == chosen(written, place(local_ranks=2)) == {}
    run = load_run(written, {"train.shrink": True})
    monkeypatch.setattr(devices, "answering_gpus", lambda count: (0, 2))
    for found in (chosen(run), chosen(run, place(local_ranks=2))):
        assert found.keys() == set(NAMES)
        assert prod(found.values()) == 2
    assert chosen(run, place(local_ranks=8)) == {}


def test_ranks_start_with_the_degrees_that_were_announced(work, gpus, monkeypatch):
    run = load_run(write_run(work / "run.yaml", model={"num_layers": 2}))
    console = Console(record=True, width=200)
    monkeypatch.setattr(devices, "with_chosen_degrees", _pipeline_of_two)
    ready = prepare_run(run, None, console=console)
    assert ready.starts_ranks
    assert ready.run.parallel.pipeline_parallel_degree == 2
    assert "degrees   pipeline 2, chosen for 4 devices" in console.export_text()
    started = []
    monkeypatch.setattr(
        "sppo.training.start.run_ranks",
        lambda words, **_: started.append(words) or JobEnd((), started_s=0.0),
    )
    start_ranks(ready, ["train", "run.yaml"])
    (words,) = started
    assert load_run(work / "run.yaml", words[6:]).parallel == ready.run.parallel


def _pipeline_of_two(run, **_):
    parallel = run.parallel.model_copy(update={NAMES[1]: 2})
    return run.model_copy(update={"parallel": parallel}), ()


@pytest.mark.slow
def test_a_run_continues_on_other_devices(work, monkeypatch):
    run = load_run(write_run(work / "run.yaml", model={"num_layers": 2}, train={"steps": 2}))
    assert sppo.train(run, progress=False).steps == 2
    monkeypatch.setattr(devices, "count_devices", lambda run: 2)
    for module in (start, input_checks):
        monkeypatch.setattr(module, "find_gpus", lambda: GPUS)
    longer = load_run(run, {"train.steps": 3})
    assert sppo.train(longer, progress=False).steps == 3
    parallel = json.loads((work / "out/run.json").read_text())["parallel"]
    assert max(parallel[name] for name in NAMES) == 2
