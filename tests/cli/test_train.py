"""``sppo train`` from the command line: refusals, unchanged files, written files and messages."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sppo.checkpoint import checkpoint
from sppo.config import load_run
from sppo.kernels.native.machine_memory import MemoryRoom
from sppo.report.metrics import JsonlSink
from sppo.training import preflight, report, run_checkpoints
from sppo.training.run_directory import locked_output
from tests.conftest import LENGTH, call, refuse, succeed, tree, write_run, write_tokens
from tests.tiers import exhaustive

KEYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_s",
    "predicted_step_s",
    "tokens_per_s",
    "mfu",
    "device_peak_bytes",
    "host_peak_bytes",
    "offloaded_bytes",
    "exposed_copy_s",
}


def refuse_unchanged(work: Path, *words: object, code: int = 2) -> str:
    before = tree(work)
    error = refuse("train", "run.yaml", *words, code=code)
    assert tree(work) == before
    return error


# Bad input: one screen, the right exit code, nothing touched


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.tokens=tokns"], "Did you mean 'tokens'?"),
        (["data.tokens=run.yaml"], "--tokenizer bytes --out OUT run.yaml`, and name OUT here"),
        (["data.tokens=."], "tokens.bin missing"),
        (["train.output=run.yaml/out"], "run.yaml is a file, not a directory"),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_bad_input(work, words, says):
    assert says in refuse_unchanged(work, *words)


def test_not_enough_memory(work, monkeypatch):
    monkeypatch.setattr("sppo.training.devices.cpu_device.memory_room", lambda: MemoryRoom(1 << 16))
    error = refuse_unchanged(work, code=4)
    assert "even with everything recomputed" in error
    assert "54.4 KiB may be used" in error  # of 64
    error = refuse_unchanged(work, "activations.policy=retain", code=4)
    assert "with activations.policy=retain, and 64.0 KiB may be used" in error


def test_a_context_longer_than_the_weights_have_seen_is_said_and_exported(work, caplog):
    succeed("train", "run.yaml", "model.max_positions=32", "train.steps=1")
    succeed("convert", "to-hf", "out", "exported")
    exported = json.loads((work / "exported" / "config.json").read_text())
    assert exported["max_position_embeddings"] == LENGTH  # what it was trained on
    words = ("train", "run.yaml", "train.steps=1", "sequence.length=256")
    caplog.clear()
    succeed(*words, "model={from_hf: exported}", "train.output=far", "-q")
    assert f"warning: sequence.length 256 is beyond the {LENGTH} positions of this" in caplog.text
    scaling = f"{{type: yarn, factor: 4, original_max_positions: {LENGTH}}}"
    assert f"model.rope_scaling={scaling}" in caplog.text


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with checkpoints after two and four, and what it has printed."""
    directory = tmp_path_factory.mktemp("finished")
    write_tokens(directory / "tokens")
    terms = {"label_smoothing": 0.1, "z_loss": 1e-4}
    write_run(directory / "run.yaml", checkpoint={"every": 2}, train=terms)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        (directory / "screen").write_text(succeed("train", "run.yaml", paints=True))
    return directory


@pytest.fixture
def trained(finished, tmp_path, monkeypatch):
    """A copy of it, as the working directory."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_another_configuration(trained):
    error = refuse_unchanged(trained, "optimizer.lr=1", "sequence.length=32")
    assert "  optimizer.lr: 0.01 there, 1.0 here\n" in error
    assert "  sequence.length: 64 there, 32 here\n" in error


def test_what_may_change_on_the_way(trained):
    """Also the directory of the run, which may be moved."""
    (trained / "out").rename(trained / "moved")
    words = ("checkpoint.every=1", "train.nonfinite=stop", "data.eval_tokens=tokens")
    policy = ("activations.policy=recompute", "sequence.num_subsequences=2", "train.steps=5")
    assert "step 5/5" in succeed("train", "run.yaml", "train.output=moved", *words, *policy)


def before_line(monkeypatch, do: Callable[[int], None]) -> None:
    """Do something with the number of a step before its line of metrics.jsonl is written."""
    write = JsonlSink.write

    def written(sink, metrics):
        do(metrics.step)
        write(sink, metrics)

    monkeypatch.setattr(JsonlSink, "write", written)


def test_another_run_is_refused_while_one_trains(work, monkeypatch):
    run, held = load_run("run.yaml"), []

    def look(step):
        before = tree(work / "out")
        with pytest.raises(ValueError, match="in use by another run"), locked_output(run):
            pass
        assert tree(work / "out") == before
        held.append(step)

    before_line(monkeypatch, look)
    succeed("train", "run.yaml")
    assert held == [1, 2, 3, 4]
    with locked_output(run):
        pass


# A full disk


def test_too_little_space_for_the_first_checkpoint_is_told_before_the_first_step(work, monkeypatch):
    full = shutil.disk_usage(work)._replace(free=1000)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: full)
    error = refuse_unchanged(work, code=4)
    assert "are free for out/checkpoints: free some space, or set train.output" in error
    assert "a checkpoint takes" in refuse("train", "run.yaml", "checkpoint.at_end=false", code=4)
    succeed("train", "run.yaml", "checkpoint.at_end=false", "checkpoint.every=0")


@pytest.mark.parametrize("extra", [["checkpoint.async_save=true"], *exhaustive([])])
def test_a_disk_that_fills_up_while_writing(trained, monkeypatch, extra):
    def fill_up(state, *, directory, ranks):
        (directory / "__0_0.distcp").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    before = tree(trained / "out/checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_tensors", fill_up)
        assert "No space left on device" in refuse_call(trained, *extra, code=4)
    assert tree(trained / "out/checkpoints") == before
    succeed("train", "run.yaml", "train.steps=6")


def refuse_call(work: Path, *extra: str, code: int) -> str:
    """Train two steps more, which fails after it has begun."""
    result = call("train", "run.yaml", "train.steps=6", *extra)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) <= 5
    return result.stderr


def full_at(monkeypatch, *, step: int) -> None:
    """Let metrics.jsonl find no room for the line of ``step``."""

    def fail(now):
        if now == step:
            raise OSError(errno.ENOSPC, "No space left on device", "out/metrics.jsonl")

    before_line(monkeypatch, fail)


def test_a_disk_too_full_for_a_line_of_metrics(work, monkeypatch):
    with monkeypatch.context() as patch:
        full_at(patch, step=2)
        result = call("train", "run.yaml", "checkpoint.every=0")
    assert result.exit_code == 4
    assert result.stderr.splitlines()[-1] == (
        "error: out/metrics.jsonl: No space left on device; the state after step 2 of 4 is saved; "
        "free some space, and the same command goes on"
    )
    assert [path.name for path in (work / "out/checkpoints").iterdir()] == ["step_000002"]
    assert "4 steps" not in result.stdout
    again = call("train", "run.yaml", "checkpoint.every=0")
    assert again.exit_code == 0
    lines = (work / "out/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3, 4]


# A plot or a summary that cannot be written does not undo a run


@pytest.mark.parametrize("name", ["run_summary.json", *exhaustive("loss.png")])
def test_a_run_is_done_without_its_plot_or_summary(work, monkeypatch, name):
    with monkeypatch.context() as patch:
        replace = Path.replace

        def fail(path, target):
            if target.name == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            return replace(path, target)

        patch.setattr(Path, "replace", fail)
        text = succeed("train", "run.yaml")
    assert f"warning: out/{name} cannot be written: No space left on device; nothing was" in text
    assert f"done and saved after step 4, without {name}; the same command writes {name}" in text
    assert (work / "out/checkpoints/step_000004").is_dir()
    assert not list((work / "out").glob("*.partial-*"))
    succeed("train", "run.yaml")
    assert (work / "out" / name).is_file()


# What stands in the way of a file is found before a step


@pytest.mark.parametrize("name", ["run.json", *exhaustive("metrics.jsonl", "loss.png")])
def test_a_directory_in_place_of_a_file(trained, name):
    (trained / "out" / name).unlink(missing_ok=True)
    (trained / "out" / name).mkdir()
    error = refuse_unchanged(trained, "train.steps=6")
    assert f"out/{name} is no file, and a run writes one there; move it away" in error


def test_a_file_in_place_of_a_directory(trained):
    shutil.rmtree("out/checkpoints")
    Path("out/checkpoints").symlink_to("nowhere")
    error = refuse_unchanged(trained, "train.steps=6")
    assert "out/checkpoints is no directory, and a run makes one there; move it away" in error


def test_what_a_killed_run_wrote_in_part_is_removed(trained):
    (trained / "out/loss.png.partial-0123456789ab").touch()
    (trained / "out/loss.png.mine").touch()
    succeed("train", "run.yaml")
    assert not (trained / "out/loss.png.partial-0123456789ab").exists()
    assert (trained / "out/loss.png.mine").exists()


# What it writes


def test_files_of_a_run(trained):
    out = trained / "out"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line.keys() >= KEYS
        assert line["tokens"] == LENGTH
        assert line["device_peak_bytes"] > 0
        assert line["skipped"] is False
    for name in ("loss.png", "timeline.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n")
    steps = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert steps == ["step_000002", "step_000004"]
    names = {"loss.png", "metrics.jsonl", "plan.json", "run.json", "run_summary.json"}
    names |= {"timeline.json", "timeline.png", "checkpoints", ".lock"}
    assert {path.name for path in out.iterdir()} == names


def test_the_screen(finished):
    text = (finished / "screen").read_text()
    terms = "label smoothing 0.1 and z-loss 0.0001"
    assert f"loss      cross entropy with {terms}; sppo eval reports the cross entropy" in text
    for start in ("model ", "data ", "cut ", "policy ", "output ", "step 1/4 | loss ", "step 4/4 "):
        assert any(line.startswith(start) for line in text.splitlines()), start
    assert "20 sequences of 64 an epoch" in text
    assert "device memory, peak" in text
    assert "host memory, peak" not in text  # of a CPU that is device memory
    assert "4 subsequences of 16 tokens (sequence.partition=auto)" in text
    assert (
        "out: metrics.jsonl, run_summary.json, loss.png, timeline.png, timeline.json, checkpoints"
    ) in text


def test_the_end_saves_unless_told_not_to(work):
    succeed("train", "run.yaml", "checkpoint.every=3", "checkpoint.at_end=false")
    assert [path.name for path in (work / "out/checkpoints").iterdir()] == ["step_000003"]
    assert len((work / "out/metrics.jsonl").read_text().splitlines()) == 4


def test_by_default_checkpoints_follow_the_clock(work, monkeypatch):
    monkeypatch.setattr(run_checkpoints, "saving_interval_s", lambda *_, **__: 0.0)
    words = ("checkpoint.at_end=false", "checkpoint.keep=9")
    succeed("train", "run.yaml", *words)
    names = sorted(path.name for path in (work / "out/checkpoints").iterdir())
    assert names == ["step_000001", "step_000002", "step_000003"]
    again = succeed("train", "run.yaml", *words)
    assert "step 4/4" in again
    assert "step 3/4" not in again
    monkeypatch.setattr(  # after the first save, further ones are not worth their time
        run_checkpoints, "saving_interval_s", lambda save_s, **_: math.inf if save_s else 0.0
    )
    succeed("train", "run.yaml", "train.output=slow", *words)
    assert [path.name for path in (work / "slow/checkpoints").iterdir()] == ["step_000001"]
    # Resumed, the run knows from the seconds of loading what a save takes.
    succeed("train", "run.yaml", "train.output=slow", *words)
    assert [path.name for path in (work / "slow/checkpoints").iterdir()] == ["step_000001"]


def test_a_last_step_that_cannot_be_told_is_saved_in_any_case(work, monkeypatch):
    full_at(monkeypatch, step=4)
    result = call("train", "run.yaml", "checkpoint.at_end=false")
    assert "all 4 steps are done and saved, the record of the last is missing" in result.stderr
    assert (work / "out/checkpoints/step_000004").is_dir()


@pytest.mark.parametrize("number", [signal.SIGTERM, *exhaustive(signal.SIGINT)])
def test_a_signal_after_the_last_step_leaves_the_exit_code_0(work, monkeypatch, number):
    drawn = report.loss_plot

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), number)
        drawn(*args, **kwargs)

    monkeypatch.setattr(report, "loss_plot", interrupted)
    succeed("train", "run.yaml")
    assert (work / "out/loss.png").exists()


def test_an_output_that_is_deleted_while_a_run_writes_into_it(work, monkeypatch):
    def delete(step):
        if step == 3:
            shutil.rmtree("out")

    before_line(monkeypatch, delete)
    error = call("train", "run.yaml", "checkpoint.every=1")
    assert error.exit_code == 2
    assert "error: out: was deleted while the run wrote into it" in error.stderr
    assert "share" not in error.stderr
    assert not (work / "out").exists()


def test_a_step_larger_than_memory_is_refused_before_anything_is_built(work, monkeypatch):
    monkeypatch.setattr(
        "sppo.training.devices.cpu_device.memory_room", lambda: MemoryRoom(64 << 20)
    )
    before = tree(work)
    start_s = time.process_time()
    said = refuse("train", "run.yaml", "train.sequences_per_step=16384", code=4)
    assert time.process_time() - start_s < 20
    assert "train.sequences_per_step=16384: the tokens and the program" in said
    assert tree(work) == before


@pytest.mark.parametrize("limit_mib", [700, *exhaustive(1150, 1500)])
def test_a_limit_of_addresses_is_told_in_a_line(work, limit_mib):
    """As ``ulimit -v`` sets it: below what libraries take, and little above."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit_mib << 20},) * 2); "
        "from sppo.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "run.yaml", "model.vocab_size=4000000"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: ")
