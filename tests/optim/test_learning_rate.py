"""The learning-rate schedule against its closed forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo.config.run import OptimizerConfig
from sppo.optim.learning_rate import learning_rate


def _rates(total_steps, **fields):
    config = OptimizerConfig.model_validate({"lr": 0.5, **fields})
    return [
        learning_rate(step, config=config, total_steps=total_steps) for step in range(total_steps)
    ]


def test_cosine_without_warmup_is_that_of_torch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7, eta_min=0.05)
    expected = []
    for _ in range(7):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert _rates(7, schedule="cosine", final_lr_ratio=0.1) == pytest.approx(expected)


def test_linear_reaches_zero_after_the_last_step():
    assert _rates(4, schedule="linear") == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_warmup_starts_at_one_share_and_peaks_once():
    rates = _rates(7, schedule="linear", warmup_steps=4)
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.375, 0.25, 0.125])


def test_constant_after_warmup():
    assert _rates(4, schedule="constant", warmup_steps=2) == [0.25, 0.5, 0.5, 0.5]


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    total=st.integers(1, 60),
    data=st.data(),
    final=st.floats(0, 1),
)
def test_rates_rise_then_fall_between_zero_and_the_peak(schedule, total, data, final):
    warmup = data.draw(st.integers(0, total))
    rates = _rates(total, schedule=schedule, warmup_steps=warmup, final_lr_ratio=final)
    peak = max(warmup - 1, 0)
    assert rates[peak] == 0.5
    assert max(rates) <= 0.5
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    falling = rates[peak:]
    assert all(a >= b - 1e-15 for a, b in zip(falling, falling[1:], strict=False))
    if schedule != "constant" and final < 0.99:  # beyond that rounding decides
        assert rates[-1] > 0.5 * final
        config = OptimizerConfig(
            lr=0.5, schedule=schedule, warmup_steps=warmup, final_lr_ratio=final
        )
        reached = learning_rate(max(total, warmup), config=config, total_steps=total)
        assert reached == pytest.approx(0.5 * final, abs=1e-12)
