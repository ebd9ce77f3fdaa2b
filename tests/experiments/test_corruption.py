"""The measurement of the watch for silent corruption runs, and finds every flip that matters."""

import pytest

from experiments import corruption


@pytest.mark.exhaustive
def test_flips_are_found_and_ordinary_steps_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(corruption, "HISTORY", 3)
    corruption.prepare(tmp_path)
    found = corruption.flips(tmp_path, steps=1, per_step=60)
    assert found["found"] == found["with_effect"] > 0
    assert found["weights_found"] == found["weights_flipped"] == 60
    for sections in (corruption._STREAM, corruption._DOCUMENTS):
        assert corruption.ordinary(tmp_path, 3, **sections)["differed"] == 0
    assert corruption.cost(tmp_path, steps=1)["share"] < 0.005
