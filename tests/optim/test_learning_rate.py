"""The learning-rate schedule against its closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo.config.run import OptimizerConfig
from sppo.optim.learning_rate import learning_rate


def _rates(total_steps: int, **fields: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 0.5, **fields})
    return [
        learning_rate(step, config=config, total_steps=total_steps) for step in range(total_steps)
    ]


def test_cosine_from_the_first_step_to_one_past_the_last() -> None:
    rates = _rates(10, schedule="cosine", final_lr_ratio=0.1)
    expected = [0.5 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / 10))) for t in range(10)]
    assert rates == pytest.approx(expected)
    assert rates[0] == 0.5
    assert rates[5] == pytest.approx(0.5 * 0.55)


def test_cosine_without_warmup_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7, eta_min=0.05)
    expected = []
    for _ in range(7):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert _rates(7, schedule="cosine", final_lr_ratio=0.1) == pytest.approx(expected)


def test_linear_reaches_zero_after_the_last_step() -> None:
    assert _rates(4, schedule="linear") == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_every_step_of_the_default_settings_learns() -> None:
    for total in (1, 2, 3, 100):
        assert min(_rates(total)) > 0


def test_warmup_starts_at_one_share_and_peaks_once() -> None:
    rates = _rates(7, schedule="linear", warmup_steps=4)
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.375, 0.25, 0.125])


def test_constant_after_warmup() -> None:
    assert _rates(4, schedule="constant", warmup_steps=2) == [0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_run_that_ends_at_its_peak_never_falls(schedule: str) -> None:
    assert _rates(1, schedule=schedule) == [0.5]
    assert _rates(2, schedule=schedule, warmup_steps=2) == [0.25, 0.5]


def test_beyond_the_last_step_the_rate_stays() -> None:
    config = OptimizerConfig(lr=1.0, schedule="cosine", final_lr_ratio=0.25)
    assert learning_rate(500, config=config, total_steps=10) == pytest.approx(0.25)


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    total=st.integers(1, 60),
    data=st.data(),
    final=st.floats(0, 1),
)
def test_rates_rise_then_fall_between_zero_and_the_peak(
    schedule: str, total: int, data: st.DataObject, final: float
) -> None:
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
