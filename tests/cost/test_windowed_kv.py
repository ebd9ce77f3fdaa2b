"""K and V of layers with a sliding window, and their gradients: bytes and seconds."""

from dataclasses import replace

import pytest

from sppo.config import PRESETS as MODELS
from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_bytes_per_token, kv_of_sequences, windowed_kv_seconds
from sppo.cost.layer import Workload
from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.stages.stage_cost import costs_without_activations
from sppo.hardware.presets import PRESETS

GIB = 1 << 30


def windowed_gib(candidate):
    """Most GiB of K and V of the layers with a window, and of gradients, of the running one too."""
    workload = candidate.workload
    keys, gradients, passing = map(float, map(sum, map(sum, kv_of_sequences(candidate))))
    of_full = 10 * sum(candidate.lengths) * sum(kv_bytes_per_token(workload))
    sizes = TensorSizes(
        workload,
        candidate.lengths[-1],
        candidate.prefixes[-1],
        recomputes_windows=candidate.recomputes_windows[0],
        kind=next(kind for kind in candidate.kinds_of_layers[0] if kind.window),
    )
    assert passing == 0
    running = sizes.window_kv_bytes + sizes.window_gradient_bytes
    return (keys + gradients - of_full + running) / GIB


@pytest.fixture
def gemma():
    """Gemma 3 27B: 52 layers with a window, 10 without."""
    workload = Workload(ModelConfig.model_validate(MODELS["gemma-3-27b"]), PRESETS["h200"])
    return Candidate(workload, (16 << 10,) * 8)


def test_gemma_at_128ki_keeps_few_keys_of_its_windows(gemma):
    """Instead of the 156 GiB of all keys, values and their gradients."""
    recomputed = windowed_gib(replace(gemma, windowed_kv="recomputed"))
    rows = 7 * 1023 * 2 + 1023 * 4  # in bf16 of seven units, in fp32 of one
    running = (16 * 1024 + 1023) * (2 + 4)
    assert recomputed == pytest.approx((52 * rows + running) * 2 * 2048 / GIB)
    assert recomputed < 5
    assert windowed_gib(gemma) == pytest.approx(52 + 52 * 1023 * 4 * 4096 / GIB + 0.27, abs=0.01)


def test_recomputation_costs_two_products_of_backward(gemma):
    """k and v of the layers with a window: a hundredth of a step."""
    again = replace(gemma, windowed_kv="recomputed")
    seconds = windowed_kv_seconds(again)
    assert not windowed_kv_seconds(gemma).any()
    more = costs_without_activations(again).backward_s - costs_without_activations(gemma).backward_s
    assert more == pytest.approx(seconds)
    costs = costs_without_activations(gemma)
    passes = (costs.forward_s + costs.backward_s + costs.weight_s).sum()
    assert 0.005 < seconds.sum() / passes < 0.02


def test_ranks_that_share_units_send_what_is_seen(gemma):
    """Of layers with a window the unit's own keys and 1023 before; never those of other units."""
    shared = replace(gemma, schedule="sppo_msp", pipeline_parallel_degree=2)
    seen = costs_without_activations(shared).seen_kv
    row_bytes = 2 * 2048 * 2
    rows = [52 * (16384 + min(1023, 16384 * n)) + 10 * 16384 * (n + 1) for n in range(8)]
    assert seen.kv_bytes.sum(axis=0) == pytest.approx([of_unit * row_bytes for of_unit in rows])
    assert (seen.gradient_bytes == 2 * seen.kv_bytes).all()
    assert costs_without_activations(gemma).seen_kv is None
