"""The best of several validations, and the line of one."""

import math

from sppo.report.validation import (
    Progress,
    ValidationMetrics,
    improvement_text,
    progress_of,
    validation_line,
)


def result(step=0, name="needle", **figures):
    known = {"loss": 2.0, "perplexity": 7.4, "labels": 9, "sequences": 3, "seconds": 6.15}
    return ValidationMetrics(step=step, set=name, by_position=(), **{**known, **figures})


def progress(values, *, least=0.0):
    records = [result(step, loss=value) for step, value in enumerate(values)]
    others = [result(step, "other", loss=0.0) for step in range(len(values))]
    return progress_of([*records, *others], watched=("needle", "loss"), least=least)


def test_best_loss_and_what_follows_it():
    assert progress([]) == Progress()
    assert progress([3.0, 2.0, 2.0, 2.5]) == Progress(2.0, 1, 2)
    assert progress([math.nan, math.inf]) == Progress(None, 0, 2)
    assert progress([math.nan, 3.0, math.nan]) == Progress(3.0, 1, 1)
    assert progress([3.0, 2.95, 2.8], least=0.1) == Progress(2.8, 2, 0)


def test_exact_matches_of_weights_that_are_no_numbers_do_not_count():
    records = [
        result(0, exact=0.5),
        result(1, exact=0.75),
        result(2, exact=1.0, loss=math.nan),
        result(3),
    ]
    assert progress_of(records, watched=("needle", "exact"), least=0) == Progress(0.75, 1, 2)


def test_line_and_reason():
    records = [
        result(50, "held_out", loss=2.431),
        result(50, loss=0.1131, accuracy=0.975, exact=0.92),
    ]
    line = validation_line(records, watched=("held_out", "loss"), before=Progress(2.44, 0))
    assert line == (
        "validation 50 | held_out 2.431 (best 2.440 at 0) | needle 0.113 acc 97.5% exact 92.0% | "
        "12.30 s"
    )
    assert improvement_text(Progress(0.92, 40, 3), watched=("needle", "exact")) == (
        "3 validations without improvement of exact on needle: the best is 92.0% at step 40"
    )
