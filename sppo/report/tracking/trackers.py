"""Trackers of experiments: one class for each, with the same three methods.

A class is made when its tracker is to receive records, and raises any error of its package if the
tracker cannot be reached.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from sppo.config.track import TrackerName
from sppo.report.tracking.records import Record
from sppo.report.tracking.track_file import Received

_log = logging.getLogger(__name__)

TENSORBOARD_DIRECTORY = "tensorboard"
_CONNECT_S = 10
"""Longest time until a tracker that has a server answers."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Name, group, tags and configuration of a run, which trackers show beside its records."""

    directory: str
    """Absolute path of the output directory."""
    project: str
    """Project, or experiment."""
    name: str | None
    """Name that the user gave the run."""
    group: str | None
    """Group of runs."""
    tags: tuple[str, ...]
    """Words to find the run by."""
    config: Mapping[str, Any]
    """Configuration of the run, and the digests of it and of its plan."""

    @property
    def shown_name(self) -> str:
        """Name of the run, by default that of its directory."""
        return self.name or Path(self.directory).name


class Tracker(Protocol):
    """One place that receives the records of a run."""

    place: str
    """Name of the place among those of this tracker."""
    id: str
    """Id of the run there."""

    def send(self, records: Sequence[Record]) -> None:
        """Send records, or hand them to what sends them even if this process is killed."""

    def close(self) -> None:
        """Wait until what was sent has arrived, and end the run there."""


class TensorBoard:
    """Event files in the run's directory."""

    place = "events"

    def __init__(self, run: TrackedRun, places: Mapping[str, Received]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        known = places.get(self.place)
        self.id = known.id if known else TENSORBOARD_DIRECTORY
        self._writer = EventFileWriter(str(Path(run.directory) / TENSORBOARD_DIRECTORY))
        # TensorBoard hides what earlier files have of this step and later ones.
        next_step = known.last_steps.get("steps", 0) + 1 if known else 1
        self._add(next_step, session_log=SessionLog(status=SessionLog.START))
        shown = "    " + json.dumps(run.config, indent=2).replace("\n", "\n    ")
        text = Summary.Value(
            tag="config",
            metadata=SummaryMetadata(plugin_data={"plugin_name": "text"}),
            tensor=TensorProto(dtype="DT_STRING", string_val=[shown.encode()]),
        )
        self._add(next_step, summary=Summary(value=[text]))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def send(self, records: Sequence[Record]) -> None:
        """Write records to the event file, and flush it."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for record in records:
            numbers = record.values.items()
            values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers]
            self._add(record.step, summary=Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """Weights & Biases; without a key or a network, files that ``wandb sync`` sends later.

    ``WANDB_MODE``, and the other variables of wandb, are respected.
    """

    def __init__(self, run: TrackedRun, places: Mapping[str, Received]) -> None:
        import wandb

        online, offline = run.project, f"{run.project}, offline"
        known = places.get(online) or places.get(offline)
        self.id = known.id if known else uuid.uuid4().hex[:8]
        settings = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=_CONNECT_S,
            login_timeout=_CONNECT_S,
            x_stats_pid=os.getppid(),
        )

        def begin(mode: Literal["offline"] | None) -> Any:
            return wandb.init(
                id=self.id,
                resume="allow",
                project=run.project,
                name=run.shown_name,
                group=run.group,
                tags=run.tags,
                config=dict(run.config),
                dir=run.directory,
                mode=mode,
                settings=settings,
            )

        try:
            self._run = begin(None)
        except wandb.Error as error:
            _log.info("wandb: %s: offline, in files that wandb sync sends later", first_line(error))
            wandb.teardown()  # which else knows the id as that of a run in progress
            self._run = begin("offline")
        self.place = offline if self._run.offline else online
        where = self._run.settings.sync_dir if self._run.offline else self._run.url
        _log.info("wandb: %s", where)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, records: Sequence[Record]) -> None:
        """Hand records to wandb's own process."""
        for record in records:
            self._run.log({"step": record.step, **record.values})

    def close(self) -> None:
        """Wait until all has arrived; what has not is in files for ``wandb sync``."""
        self._run.finish()


class Trackio:
    """Trackio's local database, or the Space or server that its variables name."""

    def __init__(self, run: TrackedRun, places: Mapping[str, Received]) -> None:
        import trackio

        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        self.place = f"{run.project} at {remote or trackio.utils.TRACKIO_DIR}"
        known = places.get(self.place)
        # Trackio finds a run by its name, and many runs may have a directory of one name.
        self.id = known.id if known else run.name or f"{run.shown_name}-{uuid.uuid4().hex[:6]}"
        self._run: Any = trackio.init(
            project=run.project,
            name=self.id,
            group=run.group,
            config={**run.config, "tags": list(run.tags)},
            resume="allow",
            embed=False,
        )

    def send(self, records: Sequence[Record]) -> None:
        """Hand records to trackio's own thread."""
        for record in records:
            self._run.log(dict(record.values), step=record.step)

    def close(self) -> None:
        """Wait until all is stored."""
        self._run.finish()


class Mlflow:
    """The MLflow server of ``MLFLOW_TRACKING_URI``; without it, files in ``mlruns``."""

    _SETTINGS: ClassVar = {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # it is tried again later
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(_CONNECT_S),
    }
    _MOST_METRICS, _MOST_PARAMETERS, _MOST_LETTERS = 1000, 100, 500

    def __init__(self, run: TrackedRun, places: Mapping[str, Received]) -> None:
        for name, value in self._SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri()
        self._client = MlflowClient(uri)
        self.place = f"{run.project} at {uri}"
        known = places.get(self.place)
        if known:
            self.id = known.id
            self._client.update_run(self.id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        made = self._client.create_run(
            experiment.experiment_id if experiment else self._client.create_experiment(run.project),
            run_name=run.shown_name,
            tags={**({"group": run.group} if run.group else {}), **dict.fromkeys(run.tags, "true")},
        )
        self.id = made.info.run_id
        self._describe(run)

    def _describe(self, run: TrackedRun) -> None:
        """Send the configuration; MLflow does not let parameters change later."""
        from mlflow.entities import Param

        values = _flat(run.config)
        parameters = [Param(key, str(value)[: self._MOST_LETTERS]) for key, value in values]
        for begin in range(0, len(parameters), self._MOST_PARAMETERS):
            batch = parameters[begin : begin + self._MOST_PARAMETERS]
            self._client.log_batch(self.id, params=batch)

    def send(self, records: Sequence[Record]) -> None:
        """Send records."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = (
            Metric(name, value, now_ms, record.step)
            for record in records
            for name, value in record.values.items()
        )
        while batch := list(islice(metrics, self._MOST_METRICS)):
            self._client.log_batch(self.id, metrics=batch)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self.id)


class _TrackerClass(Protocol):
    def __call__(self, run: TrackedRun, places: Mapping[str, Received]) -> Tracker: ...


TRACKERS: dict[TrackerName, _TrackerClass] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def check_package(tracker: TrackerName) -> None:
    """Raise ValueError if the package of a tracker is not installed."""
    if find_spec(tracker) is None:
        extra = "track" if tracker == "tensorboard" else tracker
        raise ValueError(
            f"{tracker} needs the package of this name: pip install 'sppo[{extra}]', or leave "
            f"{tracker} out"
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type without one."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested mappings, joined by dots, and their values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
