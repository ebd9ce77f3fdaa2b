"""Silent corruption: flipped bits end the run with the rank named; ordinary steps are untouched."""

import io

import pytest
import torch
from rich.console import Console

from sppo.checkpoint import checkpoint
from sppo.checkpoint.checkpoint import read_weights
from sppo.checkpoint.files import list_checkpoints
from sppo.config import load_run
from sppo.training import run_checkpoints
from sppo.training.interruption import CorruptionError
from sppo.training.state import TrainingState
from sppo.training.trainer import StepLoop
from sppo.training.watch import corruption
from sppo.training.watch.corruption import sums_of_bits
from sppo.training.watch.usual import ElementShares, UsualFigure, is_alone
from tests.conftest import call
from tests.training.jobs import losses, train_alone


def flip(tensor, index, bit):
    """Flip one bit of one element."""
    tensor.view(-1)[index : index + 1].view(torch.int32).bitwise_xor_(1 << bit)


def key_of(rows, part):
    """Key of the row of a part of the model."""
    return next(key for key in rows if key.startswith(part))


def flip_with_effect(gradients, row, index):
    """Flip the bit of an element that changes the norm of all gradients least, but by over 1e-3."""
    norm = float(torch.linalg.vector_norm(torch.cat([*gradients.values()])))
    for bit in range(31):
        before = float(gradients[row][index])
        flip(gradients[row], index, bit)
        after = float(gradients[row][index])
        effect = abs((1 + (after**2 - before**2) / norm**2) ** 0.5 - 1)
        if effect > 1e-3:
            return
        flip(gradients[row], index, bit)
    raise AssertionError("no bit of the element matters")


@pytest.fixture
def flips(monkeypatch):
    """Put (step, place, row, element) in here: one bit of that flips once, in that step."""
    wanted, step = [], 0
    finish, run = TrainingState.finish_gradients, StepLoop._step

    def struck(place):
        found = [one for one in wanted if one[:2] == (step, place)]
        for one in found:
            wanted.remove(one)
        return [one[2:] for one in found]

    def finished(state, await_device):
        finish(state, await_device)
        for row, index in struck("gradient"):
            flip_with_effect(state.gradients, key_of(state.gradients, row), index)

    def stepped(loop, number, *rest):
        nonlocal step
        step = number + 1
        for row, index in struck("weight"):
            weights = loop._state.weights
            flip(weights[key_of(weights, row)], index, 0)
        return run(loop, number, *rest)

    monkeypatch.setattr(TrainingState, "finish_gradients", finished)
    monkeypatch.setattr(StepLoop, "_step", stepped)
    return wanted


def test_a_step_stands_out_against_the_spread_of_the_last_ones():
    figure = UsualFigure()
    for step in range(32):
        assert not figure.is_left_by(100.0)  # too few to compare with
        figure.add(8.0 + step % 5)
    found = [figure.is_left_by(value) for value in (6.5, 14.3, 6.3, 14.5)]
    assert found == [False, False, True, True]


def test_elements_that_are_often_large_have_their_own_history():
    shares = ElementShares()
    assert shares.standing_out({"norm": 0.1, "matrix": 0.044}) == ["norm"]
    assert [is_alone(0.1, following) for following in (0.044, 0.049, 0.051)] == [True, True, False]
    for share in (0.1, 0.2, 0.15):
        shares.add({"norm": share, "matrix": 0.01})
    assert shares.standing_out({"norm": 0.39, "matrix": 0.046}) == ["matrix"]
    assert shares.standing_out({"norm": 0.41, "matrix": 0.044}) == ["norm"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_bit_counts_in_the_sum(dtype):
    row = torch.randn(11).to(dtype)
    before, bits = sums_of_bits([row]), row.view(torch.uint8)
    for index in range(len(bits)):
        bits[index] ^= 1 << index % 8
        assert sums_of_bits([row]) != before
        bits[index] ^= 1 << index % 8
    assert sums_of_bits([row]) == before


@pytest.mark.parametrize(
    ("place", "row", "said"),
    [
        ("gradient", "layers.0", "step 3: loss .* computed again from the same inputs: layers.0"),
        ("weight", "layers.0", "step 3: weights changed without an update: layers.0"),
    ],
)
def test_a_flipped_bit_ends_the_run_before_the_update(work, run_file, flips, place, row, said):
    run = load_run(run_file(train={"steps": 4}, checkpoint={"every": 1}))
    flips.append((3, place, row, 5))
    with pytest.raises(CorruptionError, match=f"rank 0 computed or kept wrong values: {said}"):
        train_alone(run)
    saved, _ = read_weights("out")
    assert saved.step == 2
    train_alone(run.with_values({"train.output": "sound"}))
    train_alone(run)
    assert losses(work / "out") == losses(work / "sound")


@pytest.mark.parametrize(("reading", "async_save"), [("save_tensors", False), ("copied", True)])
def test_a_weight_that_changes_while_it_is_saved_is_not_published(
    work, run_file, monkeypatch, reading, async_save
):
    read = getattr(checkpoint, reading)

    def read_flipped(blocks, **options):
        flip(blocks["model.embed.weight"][0].tensor, 5, 3)
        return read(blocks, **options)

    monkeypatch.setattr(checkpoint, reading, read_flipped)
    with pytest.raises(CorruptionError, match="step 4: weights changed without an update"):
        train_alone(load_run(run_file(checkpoint={"async_save": async_save})))
    assert not list_checkpoints(work / "out/checkpoints")


def test_a_weight_that_is_not_finite_any_more_is_a_fault_of_the_device(work, monkeypatch):
    find = run_checkpoints.nonfinite_names

    def find_flipped(state):
        if "model.embed.weight" in state:
            state["model.embed.weight"].view(-1)[5] = torch.nan
        return find(state)

    def finding_flipped(checkpoints, *step, **options):
        monkeypatch.setattr(run_checkpoints, "nonfinite_names", find_flipped)
        return save(checkpoints, *step, **options)

    save = run_checkpoints.RunCheckpoints.save
    monkeypatch.setattr(run_checkpoints.RunCheckpoints, "save", finding_flipped)
    with pytest.raises(CorruptionError, match="step 4: weights changed without an update"):
        train_alone(load_run("run.yaml"))


def test_unusual_data_is_computed_again_and_taken_with_the_same_losses(work, monkeypatch):
    monkeypatch.setattr(ElementShares, "standing_out", lambda _, shares: [*shares][-1:])
    monkeypatch.setattr(corruption, "is_alone", lambda *_: True)
    screen = io.StringIO()
    run = load_run("run.yaml")
    train_alone(run, console=Console(file=screen, width=200))
    again = [line for line in screen.getvalue().splitlines() if "again, with the same" in line]
    assert [line[:7] for line in again] == ["step 1:", "step 2:", "step 3:", "step 4:"]
    train_alone(run.with_values({"train.watch": False, "train.output": "unwatched"}))
    assert losses(work / "out") == losses(work / "unwatched")


def test_an_ordinary_step_is_computed_once(work, run_file):
    """Elements of the tiny model have over 4.5 % of the norm, but several of them."""
    screen = io.StringIO()
    run = load_run(run_file(train={"steps": 50}))
    train_alone(run, console=Console(file=screen, width=200))
    again = [line for line in screen.getvalue().splitlines() if "again, with the same" in line]
    assert len(again) <= 1


def test_gradients_whose_squares_are_zero_are_taken(work, monkeypatch):
    finish = TrainingState.finish_gradients

    def finished(state, await_device):
        finish(state, await_device)
        for row in state.gradients.values():
            row.fill_(1e-30)

    monkeypatch.setattr(TrainingState, "finish_gradients", finished)
    train_alone(load_run("run.yaml"))
    assert [norm for _, norm in losses(work / "out")] == [0.0] * 4


def test_the_command_ends_with_a_code_of_its_own(work, flips):
    flips.append((2, "weight", "layers.0", 0))
    result = call("train", "run.yaml")
    assert result.exit_code == 5
    assert result.stderr.startswith("error: rank 0 computed or kept wrong values: step 2: weights")
