"""Warm-up: it runs what the run runs later."""

from sppo.config import load_run
from sppo.engine import stage
from sppo.kernels.cross_entropy import LossTerms
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.warm_up import warm_up
from tests.conftest import write_run


def test_a_rank_warms_up_with_its_share_of_a_subsequence(work, monkeypatch):
    """All of it might not fit: there is room for a share."""
    seen, taken = set(), stage.linear_cross_entropy_with_gradient

    def watched(hidden_CH, *args, **options):
        seen.add(len(hidden_CH))
        return taken(hidden_CH, *args, **options)

    monkeypatch.setattr(stage, "linear_cross_entropy_with_gradient", watched)
    parallel = {"sequence_parallel_degree": 2}
    model = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 2}
    run = load_run(write_run(work / "run.yaml", model=model, parallel=parallel))
    warm_up(run, lengths=(400, 301), device=CpuDevice())
    assert seen == {64, 200, 151}


def test_the_loss_has_the_terms_of_the_run(work, monkeypatch):
    """A kernel is compiled for each; the first step would wait for another one."""
    seen, taken = [], stage.linear_cross_entropy_with_gradient

    def watched(*args, terms, **options):
        seen.append(terms)
        return taken(*args, terms=terms, **options)

    monkeypatch.setattr(stage, "linear_cross_entropy_with_gradient", watched)
    train = {"label_smoothing": 0.1, "z_loss": 1e-4}
    model = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 2}
    run = load_run(write_run(work / "run.yaml", model=model, train=train))
    warm_up(run, lengths=(16, 16), device=CpuDevice())
    assert set(seen) == {LossTerms(0.1, 1e-4)}
