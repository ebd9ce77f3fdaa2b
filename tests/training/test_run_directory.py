"""Output directories that a run may use; tests of the command line cover messages."""

import json
import os

import pytest

from sppo.config import load_run
from sppo.training.run_directory import check_output, locked_output, note_configuration
from tests.conftest import tree


@pytest.fixture
def run(work, run_file):
    return load_run(run_file())


def test_a_new_directory_is_made_with_its_parents_once_it_is_locked(work, run_file):
    run = load_run(run_file(train={"output": "a/b/c"}))
    before = tree(work)
    check_output(run)
    assert tree(work) == before
    with locked_output(run) as output:
        note_configuration(run, output)
    assert json.loads((work / "a/b/c/run.json").read_text()) == run.model_dump(mode="json")


def test_a_link_to_a_directory_will_do(work, run):
    (work / "elsewhere").mkdir()
    (work / "out").symlink_to("elsewhere")
    with locked_output(run) as output:
        note_configuration(run, output)
    check_output(run)
    assert (work / "elsewhere/run.json").exists()


def test_a_link_to_nowhere_is_refused(work, run):
    (work / "out").symlink_to("nowhere")
    before = tree(work)
    with pytest.raises(ValueError, match="out cannot be made"), locked_output(run):
        pass
    assert tree(work) == before


def test_not_writable_as_the_system_says(work, run, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="is not writable; choose another place"):
        check_output(run)


def test_a_run_that_came_between_looking_and_locking(run, run_file):
    other = load_run(run_file(optimizer={"lr": 0.5}))
    check_output(run)
    check_output(other)
    with locked_output(run) as output:
        note_configuration(run, output)
    said = r"optimizer.lr: 0.01 there, 0.5 here"
    with pytest.raises(ValueError, match=said), locked_output(other):
        pass


def note_with(work, run, change):
    """A directory whose noted configuration ``change`` has turned into another version's."""
    with locked_output(run) as output:
        note_configuration(run, output)
    noted = json.loads((work / "out/run.json").read_text())
    change(noted)
    (work / "out/run.json").write_text(json.dumps(noted))


def test_an_older_version_did_what_the_defaults_say(work, run, run_file):
    def forget(noted):
        del noted["model"]["qk_norm"], noted["train"]["z_loss"], noted["optimizer"]["betas"]
        del noted["activations"]
        noted["model"]["sliding_window_first_layer"] = 0
        noted["optimizer"]["offload"] = True  # a key that no version knows any more

    note_with(work, run, forget)
    check_output(run)
    other = load_run(run_file(model={"qk_norm": True}, train={"z_loss": 1e-4}))
    with pytest.raises(ValueError, match="another configuration") as caught:
        check_output(other)
    assert "model.qk_norm: None there, 'head' here" in str(caught.value)
    assert "train.z_loss: 0 there, 0.0001 here" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 5000, "run.json: nested too deeply"),
        ("{", "run.json: not JSON"),
        ("[]", "is no run's configuration"),
        ('{"optimizer": NaN}', "run.json: NaN is not JSON"),
    ],
)
def test_a_noted_configuration_that_cannot_be_read(work, run, text, says):
    (work / "out").mkdir()
    (work / "out/run.json").write_text(text)
    with pytest.raises(ValueError, match=f"{says}.*choose another train.output"):
        check_output(run)


def test_a_key_that_this_version_does_not_know(work, run):
    note_with(work, run, lambda noted: noted["optimizer"].update(momentum=0.5))
    with pytest.raises(ValueError, match="another configuration") as caught:
        check_output(run)
    assert "optimizer.momentum: 0.5 there, None here" in str(caught.value)
