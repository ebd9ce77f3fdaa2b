"""Arguments of the Python interface: a wrong type is refused with the value and the fix."""

import pytest

import sppo
from tests.conftest import write_run

FUNCTIONS = (sppo.solve, sppo.estimate, sppo.simulate, sppo.train, sppo.evaluate, sppo.trained_run)


@pytest.fixture
def run(tmp_path):
    return sppo.load_run(write_run(tmp_path / "run.yaml"))


@pytest.mark.parametrize("value", ["run.yaml", {}, None, True, 3])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_what_is_no_run_is_refused(function, value):
    with pytest.raises(TypeError, match=r"give it a run of sppo\.load_run") as caught:
        function(value)
    assert str(caught.value).startswith(f"sppo.{function.__name__}(")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda run: sppo.train(run, "plan.json"), "plan='plan.json'): give it a plan of"),
        (lambda run: sppo.simulate("plan.json"), "or a plan of sppo.solve or sppo.load_plan"),
        (lambda run: sppo.solve(run, lengths=5), "lengths=5): give it text, or leave it out"),
        (lambda run: sppo.save_plan("plan.json", run), "plan='plan.json'): give it a plan of"),
        (lambda run: sppo.load_plan(run), "give it a path, as text or as pathlib.Path"),
        (lambda run: sppo.load_plan(None), "path=None): give it a path"),
        (lambda run: sppo.evaluate(run, checkpoint=3), "checkpoint=3): give it a path"),
        (lambda run: sppo.evaluate(run, sequences=2.5), "sequences=2.5): give it a whole number"),
        (lambda run: sppo.evaluate(run, sequences=True), "sequences=True): give it a whole"),
        (lambda run: sppo.evaluate(run, on_sequence=3), "on_sequence=3): give it a function"),
    ],
)
def test_other_arguments_are_refused(run, call, says):
    with pytest.raises(TypeError) as caught:
        call(run)
    assert says in str(caught.value)


def test_a_plan_is_saved_under_a_path_alone(run, tmp_path):
    plan = sppo.solve(run)
    with pytest.raises(TypeError, match=r"path=3\): give it a path"):
        sppo.save_plan(plan, 3)
    for path, says in ((tmp_path, "is a directory"), (tmp_path / "no/plan", "no directory")):
        with pytest.raises(ValueError, match=f"sppo.save_plan: path {path}.*{says}"):
            sppo.save_plan(plan, path)
