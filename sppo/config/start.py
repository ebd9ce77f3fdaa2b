"""Section ``start`` of a run file: another run whose checkpoint a run starts from."""

from __future__ import annotations

from typing import Literal

from sppo.config.base import Directory, Section, Steps


class StartConfig(Section):
    """Checkpoint of another run from which a new run starts; its degrees may be others.

    Keys of ``model`` that are left out are those of that run, and only ``rope_theta``,
    ``rope_scaling`` and ``max_positions`` may differ from them.
    """

    from_run: Directory
    """Output directory of the other run, whose fp32 weights are the initial weights. If it has an
    adapter, a run with the same section ``adapter`` goes on with it, and one without the section
    starts from the merged weights."""
    step: Literal["best"] | Steps | None = None
    """Number of steps after which the checkpoint was saved, or best: the one with which
    ``validation.watch`` was best. null starts from the newest."""
    optimizer: bool = False
    """Whether the moments of the optimizer and its number of updates are taken along. The
    learning-rate schedule begins at step 0 in any case."""
    data: bool = False
    """Whether the data goes on where that checkpoint stopped, instead of at its beginning; only
    with the same data, seed and length."""
