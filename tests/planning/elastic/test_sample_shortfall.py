"""Words of the error of a step of samples that does not fit."""

import pytest

from sppo.planning.elastic.sample_shortfall import stages_text


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([3], "stage 3"),
        ([1, 3], "stages 1, 3"),
        ([0, 1, 2, 3], "stages 0, 1, 2, 3"),
        (range(32), "stages 0 to 31"),
        (range(1, 32, 2), "stages 1, 3, ..., 31"),
    ],
)
def test_many_stages_take_few_words(stages, text):
    assert stages_text(stages) == text
