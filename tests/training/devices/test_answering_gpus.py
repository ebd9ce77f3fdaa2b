"""GPUs that answer, fail and hang; processes stand for them."""

from sppo.training.devices import answering_gpus as probe

USE = """
import os, time
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
assert gpu != "fails"
while gpu == "hangs":
    time.sleep(1)
"""


def test_gpus_that_fail_or_hang_do_not_count(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "well,fails,hangs,well too")
    monkeypatch.setattr(probe, "_USE", USE)
    monkeypatch.setattr(probe, "_LIMIT_S", 5.0)
    assert probe.answering_gpus(4) == (0, 3)
