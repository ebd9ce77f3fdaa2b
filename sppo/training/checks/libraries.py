"""Early import of the libraries that every run loads, before free memory is measured.

The plots at the end of a run load tens of MiB of libraries. In a small container a plan that did
not account for them would have the run killed after its last step.
"""

from __future__ import annotations

from functools import cache


@cache
def load_libraries(*, tensorboard: bool = False) -> None:
    """Import the plotting libraries; takes a second once, which the run would spend later.

    Args:
        tensorboard: Also import the writer of TensorBoard's event files.
    """
    from matplotlib.backends import backend_agg  # noqa: F401

    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
