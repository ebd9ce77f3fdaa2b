"""What trackers stored, read back with their own packages: (step, value) of each name."""

import json
import struct
import sys
from collections import defaultdict


def stored(tracker, directory):
    """Return the numbers that a tracker has of a run, by name, as (step, value) in order."""
    found = defaultdict(list)
    for name, step, value in _READERS[tracker](directory):
        found[name].append((step, value))
    return dict(found)


def keep_files_in(directory, monkeypatch):
    """Let trackers store and find their files in ``directory``, whatever was imported before."""
    monkeypatch.chdir(directory)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(directory / "trackio"))
    for name, module in list(sys.modules.items()):
        if name.startswith("trackio.") and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", directory / "trackio")


def _of_tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "out/tensorboard"), {"scalars": 0}).Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield name, event.step, event.value


def _of_wandb(directory):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes the rest
    for path in sorted((directory / "out/wandb").glob("offline-run-*/*.wandb")):
        for data in _log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            row = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            step = row.get("step")
            for name in row.keys() - {"step"}:
                if not name.startswith("_"):
                    yield name, step, float(row[name])


def _log_records(content):
    """Yield the records of a LevelDB log, which wandb's files are, with a head of seven bytes."""
    block, position, parts = 1 << 15, 7, b""
    while position + 7 <= len(content):
        if block - position % block < 7:
            position += block - position % block
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def _of_trackio(directory):
    from trackio.sqlite_storage import SQLiteStorage

    (place,) = json.loads((directory / "out/track.json").read_text())["trackio"].values()
    for row in SQLiteStorage.get_logs("sppo", place["id"]):
        for name in row.keys() - {"step", "timestamp"}:
            yield name, row["step"], float(row[name])


def _of_mlflow(directory):
    from mlflow import MlflowClient

    client = MlflowClient((directory / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("sppo")
    for run in client.search_runs([experiment.experiment_id]):
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                yield name, metric.step, metric.value


_READERS = {
    "tensorboard": _of_tensorboard,
    "wandb": _of_wandb,
    "trackio": _of_trackio,
    "mlflow": _of_mlflow,
}
