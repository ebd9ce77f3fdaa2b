"""Rank whose device may not answer: it reports the failure first, then exits."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from rich.console import Console

from sppo.config import load_run
from sppo.engine.engine import Engine
from sppo.engine.stage import Stage
from sppo.parallel.job import timed_call
from sppo.parallel.job.environment import RankEnvironment
from sppo.parallel.job.failure_report import RankEnd
from sppo.parallel.job.flight_record import RankProgress, read_progress
from sppo.parallel.job.peer_errors import LATE, PeerLostError
from sppo.parallel.mesh import alone
from sppo.training import job as job_module
from sppo.training import state, trainer
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.cuda_device import CudaDevice
from sppo.training.job import joined
from sppo.training.preflight import preflight
from tests.conftest import write_run
from tests.training.jobs import job_alone
from tests.training.whole_runs.test_gpu_runs import train_on_a_fake_gpu


class OddError(RuntimeError):
    """Something that no code foresees."""


def fail(*_, **__):
    raise OddError("at odds")


@pytest.fixture
def run(work, monkeypatch):
    monkeypatch.setattr(trainer, "warm_up", lambda run, **_: None)
    return load_run(write_run(work / "run.yaml", model={"num_layers": 2}))


@pytest.mark.parametrize(("owner", "part"), [(Stage, "forward"), (state, "clip_")])
def test_a_failure_is_noted_before_the_device_is_waited_for(run, work, monkeypatch, owner, part):
    """In a step and after one: before the engine is closed."""
    record, original, found = work / "record", Engine.close, []

    def look(self):
        found.append(read_progress(record))
        return original(self)

    monkeypatch.setattr(Engine, "close", look)
    monkeypatch.setattr(owner, part, fail)
    job = replace(job_alone(run), progress=RankProgress(record))
    with pytest.raises(OddError):
        trainer.train(preflight(job))
    assert {(note.state, note.message) for note in found} == {("failed", "OddError: at odds")}


def lose_devices(rank, directory, arguments):
    """What a rank says whose device does not come to the end of its step."""
    with mock.patch.object(CudaDevice, "wait_with_timeout", return_value=False):
        try:
            train_on_a_fake_gpu(rank, directory, arguments)
        except PeerLostError as error:
            return str(error)
    return ""


def test_a_device_that_waits_for_another_rank_for_too_long_is_a_lost_rank(ranks, run, work):
    words = ["parallel.pipeline_parallel_degree=2", "parallel.timeout_s=50000"]
    said = ranks.run(lose_devices, work, words, ranks=2)
    expected = (
        "step 1: waiting for this rank's device, which waits for another rank: timed out after "
        f"50000 s{LATE}"
    )
    assert said == [expected] * 2
    path = work / "record"
    progress = RankProgress(path)
    progress.failed(PeerLostError(said[0]))
    assert RankEnd(0, 1, 0.0, False, read_progress(path)).timeout == "timed out after 50000 s"


QUIET = Console(quiet=True)
PLACE = RankEnvironment(0, 2, 0, 2, "here", 1, "torchrun")


def of_two_ranks(run):
    parallel = run.parallel.model_copy(update={"pipeline_parallel_degree": 2})
    return run.model_copy(update={"parallel": parallel})


@pytest.mark.parametrize("part", ["connect", "Mesh"])
def test_a_rank_that_is_half_connected_ends_without_pythons_shutdown(run, monkeypatch, part):
    monkeypatch.setattr(timed_call, "_without_shutdown", timed_call.Event())
    monkeypatch.setattr(job_module, "connect", lambda *_, **__: None)
    monkeypatch.setattr(job_module, part, lambda *_, **__: fail())
    two, device = of_two_ranks(run), CpuDevice()
    with pytest.raises(OddError), joined(two, PLACE, device=device, console=QUIET):
        pass
    assert timed_call._ends_at_once()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_only_ranks_with_a_gpu_end_without_pythons_shutdown(run, monkeypatch, on_gpu):
    monkeypatch.setattr(timed_call, "_without_shutdown", timed_call.Event())
    for name in ("connect", "disconnect"):
        monkeypatch.setattr(job_module, name, lambda *_, **__: None)
    monkeypatch.setattr(job_module, "Mesh", lambda *_, **__: alone())
    device = CpuDevice(group_device=torch.device("cuda", 0) if on_gpu else None)
    two = of_two_ranks(run)
    with joined(two, PLACE, device=device, console=QUIET):
        pass
    assert not timed_call._ends_at_once()
    with pytest.raises(OddError), joined(two, PLACE, device=device, console=QUIET):
        fail()
    assert timed_call._ends_at_once() == on_gpu
