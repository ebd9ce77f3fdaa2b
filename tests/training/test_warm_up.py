"""Warm-up: it runs what the run runs later."""

import pytest

from sppo.config import load_run
from sppo.engine import stage_providers
from sppo.kernels.cross_entropy import LossTerms
from sppo.model.gradients import GradientSum
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.warm_up import warm_up
from tests.conftest import write_run


def test_a_rank_warms_up_with_its_share_of_a_subsequence_and_the_terms_of_the_loss(
    work, monkeypatch
):
    """All of it might not fit; a kernel is compiled for each number of rows, and for the terms."""
    seen, terms_seen, taken = set(), set(), stage_providers.linear_cross_entropy_with_gradient

    def watched(hidden_CH, *args, terms, **options):
        seen.add(len(hidden_CH))
        terms_seen.add(terms)
        return taken(hidden_CH, *args, terms=terms, **options)

    monkeypatch.setattr(stage_providers, "linear_cross_entropy_with_gradient", watched)
    run = load_run(
        write_run(
            work / "run.yaml",
            model={"preset": "tiny-test", "vocab_size": 32, "num_layers": 2},
            parallel={"sequence_parallel_degree": 2},
            train={"label_smoothing": 0.1, "z_loss": 1e-4},
        )
    )
    warm_up(run, lengths=(400, 301), device=CpuDevice())
    assert seen == {64, 200, 151}
    assert terms_seen == {LossTerms(0.1, 1e-4)}


HYBRID = {
    "layer_types": ["linear", "full", "linear"],
    "linear_attention": {"key_heads": 1, "value_heads": 2, "key_size": 8, "value_size": 8},
}


@pytest.mark.parametrize(
    ("sections", "names", "kinds"),
    [
        ({"adapter": {"rank": 3, "targets": "q", "layers": 2}}, {"q.lora_a", "q.lora_b"}, {}),
        ({"train": {"only": ["layers.2.up.*", "embed.*"]}}, {"up.weight"}, {}),
        (
            {"train": {"only": ["layers.*.linear_q.*", "layers.1.[qk].*"]}},
            {"linear_q.weight", "q.weight", "k.weight"},
            HYBRID,
        ),
    ],
)
def test_a_layer_of_each_kind_trains_what_trains_in_any(sections, names, kinds, work, monkeypatch):
    taken, add = set(), GradientSum.product
    monkeypatch.setattr(
        GradientSum, "product", lambda self, name, **x: taken.add(name) or add(self, name, **x)
    )
    model = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 3, **kinds}
    run = load_run(write_run(work / "run.yaml", model=model, **sections))
    warm_up(run, lengths=(40,), device=CpuDevice())
    assert taken == names
