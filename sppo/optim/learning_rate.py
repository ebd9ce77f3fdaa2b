"""Learning rate schedule as a pure function of the step, without state to save or resume."""

from __future__ import annotations

import math

from sppo.config.optimizer import OptimizerConfig, steps_of


def learning_rate(step: int, *, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0.

    The schedule has T steps: ``schedule_steps``, or else all steps of the run. Warm-up over w steps
    gives step t the rate lr (t + 1) / w, so that step 0 already learns and step w - 1 has the peak
    rate. The decay begins at that step, or with wsd d steps before T, and ends at step T with
    ``final_lr_ratio`` lr, which stays. T is the first step after the schedule, so every step of a
    run learns, even the last step of a decay to 0. PyTorch's CosineAnnealingLR, transformers'
    schedules and torchtitan (which adds a virtual last step) count the same way.

    Args:
        step: Number of the step.
        config: Optimizer configuration with the schedule.
        total_steps: Number of steps of the run.
    """
    assert step >= 0, f"step {step}"
    assert total_steps >= 1, f"{total_steps} steps"
    total = config.schedule_steps or total_steps
    warmup = steps_of(config.warmup_steps, of=total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    begin, form = max(warmup - 1, 0), str(config.schedule)
    if config.schedule == "wsd":
        assert config.decay_steps is not None, "checked with the run file"
        begin, form = total - steps_of(config.decay_steps, of=total), config.decay or "linear"
    if form == "constant" or total <= begin or step < begin:
        return config.lr
    progress = min((step - begin) / (total - begin), 1.0)
    return config.lr * _share(form, progress, final=config.final_lr_ratio)


def _share(form: str, progress: float, *, final: float) -> float:
    """Return the factor of lr at a progress p of 0 to 1 of the decay to the final ratio f.

    linear: 1 - (1 - f) p. cosine (Loshchilov and Hutter, 2017, equation 5):
    f + (1 - f) (1 + cos(pi p)) / 2. sqrt (Haegele et al., 2024): f + (1 - f) (1 - sqrt(p)).
    """
    if form == "linear":
        return 1.0 - (1.0 - final) * progress
    if form == "sqrt":
        return final + (1.0 - final) * (1.0 - math.sqrt(progress))
    assert form == "cosine", f"schedule {form}"
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
