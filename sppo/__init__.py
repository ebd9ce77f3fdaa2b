"""SPPO: training of transformers on very long sequences, cut into subsequences.

The Python interface offers the functions of the command line::

    import sppo

    run = sppo.load_run("run.yaml", {"optimizer.lr": 1e-3})
    plan = sppo.solve(run)
    result = sppo.train(run)

Importing this package imports nothing else: each name below is loaded when it is first used, and
only training, evaluation and the engine load torch. It sets ``OMP_WAIT_POLICY=passive`` for torch
unless the variable is set, so import it before torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from sppo.version import __version__

if TYPE_CHECKING:
    from sppo.api import estimate as estimate
    from sppo.api import evaluate as evaluate
    from sppo.api import load_plan as load_plan
    from sppo.api import save_plan as save_plan
    from sppo.api import simulate as simulate
    from sppo.api import solve as solve
    from sppo.api import train as train
    from sppo.config import ConfigError as ConfigError
    from sppo.config import RunConfig as RunConfig
    from sppo.config import load_run as load_run
    from sppo.cost.trainable import trainable_of_run as trainable_of_run
    from sppo.engine.engine import Engine as Engine
    from sppo.engine.unit import SequenceData as SequenceData
    from sppo.model.gradients import zero_gradients as zero_gradients
    from sppo.model.initialize import initial_weights as initial_weights
    from sppo.planning.nothing_fits import NothingFitsError as NothingFitsError
    from sppo.planning.plan import ExecutionPlan as ExecutionPlan
    from sppo.report.metrics import StepMetrics as StepMetrics
    from sppo.schedule.timeline import Timeline as Timeline
    from sppo.training.trained_run import RunFailedError as RunFailedError
    from sppo.training.trained_run import TrainedRun as TrainedRun
    from sppo.training.trained_run import trained_run as trained_run

_MODULES = {
    "sppo.config": ("ConfigError", "RunConfig", "load_run"),
    "sppo.api": ("estimate", "evaluate", "load_plan", "save_plan", "simulate", "solve", "train"),
    "sppo.training.trained_run": ("RunFailedError", "TrainedRun", "trained_run"),
    "sppo.planning.nothing_fits": ("NothingFitsError",),
    "sppo.planning.plan": ("ExecutionPlan",),
    "sppo.schedule.timeline": ("Timeline",),
    "sppo.report.metrics": ("StepMetrics",),
    "sppo.cost.trainable": ("trainable_of_run",),
    "sppo.engine.engine": ("Engine",),
    "sppo.engine.unit": ("SequenceData",),
    "sppo.model.initialize": ("initial_weights",),
    "sppo.model.gradients": ("zero_gradients",),
}
"""Names that this package offers, by the module that has them."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_HOMES]


def _let_waiting_threads_sleep() -> None:
    """Set OpenMP's wait policy, which is read when torch is imported; warn if that is over.

    Threads that wait for work would spin: with anything else on the cores, small steps take many
    times longer.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    if "torch" not in sys.modules:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        return
    warnings.warn(
        "torch was imported before sppo, so its threads spin while they wait, and steps on a CPU "
        "take many times longer beside other programs: import sppo first, or set "
        "OMP_WAIT_POLICY=passive in the environment",
        stacklevel=3,
    )


_let_waiting_threads_sleep()


def __getattr__(name: str) -> Any:
    """Load a name of ``__all__`` when it is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sppo' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names that this package offers, loaded or not."""
    return sorted({*globals(), *__all__})
