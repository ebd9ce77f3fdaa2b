"""Section ``track``: the experiment trackers that receive the records of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from sppo.config.base import Section, comma_list

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
_Text = Annotated[str, Field(min_length=1)]


class TrackConfig(Section):
    """Experiment trackers that receive losses, speed, memory and validations of the run.

    A process of its own sends them, from the files in ``train.output``: a tracker that fails or is
    slow does not stop or slow the run.
    """

    to: Annotated[tuple[TrackerName, ...], BeforeValidator(comma_list)] = ()
    """Trackers. Each is an extra of its own: ``pip install 'sppo[wandb]'``, and likewise
    ``trackio``, ``mlflow``, and ``track`` for TensorBoard."""
    project: _Text = "sppo"
    """Project of the run; an experiment of MLflow. Unused by TensorBoard."""
    name: _Text | None = None
    """Name of the run; if left out, that of the directory ``train.output``."""
    group: _Text | None = None
    """Group of runs that belong together."""
    tags: Annotated[tuple[_Text, ...], BeforeValidator(comma_list)] = ()
    """Words to find the run by."""
