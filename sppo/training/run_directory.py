"""Output directory of a run, which belongs to one configuration and one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY
from sppo.config import RunConfig
from sppo.config.base import Section
from sppo.config.json_file import JsonError, read_json
from sppo.config.model import upgraded_fields
from sppo.config.start_model import CONFIG_FILE
from sppo.output_file import PARTIAL, write_json
from sppo.quoting import quoted
from sppo.report.metrics import METRICS_FILE
from sppo.report.tracking.track_file import TRACK_FILE
from sppo.report.tracking.trackers import TENSORBOARD_DIRECTORY
from sppo.report.validation import VALIDATION_FILE

PLAN_FILE = "plan.json"
FAILURES_FILE = "failures.jsonl"
SUMMARY_FILE = "run_summary.json"
LOSS_PLOT, POSITIONS_PLOT, EXPERTS_PLOT = "loss.png", "loss_by_position.png", "experts.png"
TIMELINE_PLOT, TIMELINE_TRACE = "timeline.png", "timeline.json"
_LOCK_FILE = ".lock"
RESULT_FILES = (
    METRICS_FILE,
    VALIDATION_FILE,
    SUMMARY_FILE,
    LOSS_PLOT,
    POSITIONS_PLOT,
    EXPERTS_PLOT,
    TIMELINE_PLOT,
    TIMELINE_TRACE,
)
"""Files that a run writes beside its checkpoints, in the order in which the report names them."""
_FILES = (CONFIG_FILE, PLAN_FILE, TRACK_FILE, FAILURES_FILE, *RESULT_FILES)
_BEFORE_CONFIG = (_LOCK_FILE, FAILURES_FILE, f"{CONFIG_FILE}{PARTIAL}")
"""Beginnings of the names of files that a run leaves if it fails before it has written its
configuration."""

_MAY_CHANGE = frozenset(
    {
        *("activations", "checkpoint", "hardware", "parallel", "planning", "state", "track"),
        "validation",
        *("data.eval_tokens", "optimizer.offload"),
        *(
            f"sequence.{key}"
            for key in ("num_subsequences", "partition", "alignment", "boundaries")
        ),
        *(
            "train.steps",
            "train.epochs",
            "train.tensorboard",
            "train.nonfinite",
            "train.max_nonfinite_steps",
            "train.restarts",
            "train.shrink",
        ),
        *("train.norms_every", "train.output"),
    }
)
"""Sections and keys that may change when a run is resumed: its length, how often it is saved,
validated and displayed, the number of ranks, how sequences are cut and what is recomputed (none of
which changes what is learnt), the data of evaluations, trackers, and ``optimizer.offload``, a key
of an earlier version."""


def check_output(run: RunConfig) -> None:
    """Raise ValueError if the output directory cannot be used by this run; changes nothing.

    Raises:
        ValueError: The output is not a directory, is not writable, holds foreign files, or belongs
            to a run with another configuration.
    """
    output = Path(run.train.output)
    nearest = next(p for p in (output, *output.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise ValueError(f"train.output {output}: {nearest} is a file, not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"train.output {output}: {nearest} is not writable; choose another place")
    if not output.exists():
        return
    _check_places(output)
    config = output / CONFIG_FILE
    if config.exists():
        _check_same(run, config)
    elif any(_is_foreign(entry) for entry in output.iterdir()):
        raise ValueError(
            f"train.output {output} holds files but no {CONFIG_FILE}, so it is no run's directory; "
            "choose an empty or a new one"
        )


def _check_places(output: Path) -> None:
    """Raise ValueError if an existing entry prevents a run from writing its files."""
    for name in (*_FILES, CHECKPOINTS_DIRECTORY, TENSORBOARD_DIRECTORY):
        path, is_file = output / name, name in _FILES
        if os.path.lexists(path) and not (path.is_file() if is_file else path.is_dir()):
            kind = "file, and a run writes" if is_file else "directory, and a run makes"
            raise ValueError(f"{path} is no {kind} one there; move it away")
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{path} is not writable; change that, or choose another train.output")


def _is_foreign(entry: Path) -> bool:
    return not entry.name.startswith(_BEFORE_CONFIG)


@contextmanager
def locked_output(run: RunConfig) -> Iterator[Path]:
    """Create and lock the output directory; the lock is released however the process ends.

    Raises:
        ValueError: The directory cannot be created, another process trains into it, or it belongs
            to a run with another configuration (:func:`check_output`).
    """
    output = Path(run.train.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"train.output {output} cannot be made: {error.strerror}; choose another place"
        ) from None
    with (output / _LOCK_FILE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"train.output {output} is in use by another run; wait for it or choose another"
            ) from None
        check_output(run)
        for name in _FILES:  # what a killed run has left behind
            for partial in output.glob(f"{name}{PARTIAL}*"):
                partial.unlink(missing_ok=True)
        yield output


def require_output(output: Path) -> None:
    """Raise FileNotFoundError if the locked output directory was deleted.

    Raises:
        FileNotFoundError: The directory, or its lock file, no longer exists.
    """
    if not (output / _LOCK_FILE).exists():
        raise FileNotFoundError(
            errno.ENOENT,
            "was deleted while the run wrote into it, and with it what was saved; the same command "
            "begins again",
            str(output),
        )


def note_configuration(run: RunConfig, output: Path) -> None:
    """Write the configuration of the run into its output directory; the caller holds the lock."""
    write_json(output / CONFIG_FILE, run.model_dump(mode="json"))


def _check_same(run: RunConfig, config: Path) -> None:
    try:
        before = read_json(config)
    except JsonError as error:
        raise ValueError(f"{error}; choose another train.output") from None
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"{config} cannot be read: {reason}; choose another train.output"
        ) from None
    if not isinstance(before, dict):
        raise ValueError(f"{config} is no run's configuration; choose another train.output")
    if isinstance(before.get("model"), dict):
        before["model"] = upgraded_fields(before["model"])
    differences = list(_differences(_completed(before, run), run.model_dump(mode="json")))
    if differences:
        listed = "\n".join(f"  {line}" for line in differences)
        raise ValueError(
            f"train.output {run.train.output} belongs to a run with another configuration:\n"
            f"{listed}\nchoose another train.output, or restore these values to go on with it"
        )


def _completed(before: dict[str, Any], now: Section) -> dict[str, Any]:
    """Return a stored section with defaults for the keys that an older version did not know.

    Args:
        before: Section as an earlier call stored it.
        now: The same section of this run.
    """
    completed = dict(before)
    for key, field in type(now).model_fields.items():
        section = getattr(now, key)
        if key not in completed and not field.is_required():
            default = field.get_default(call_default_factory=True)
            completed[key] = to_jsonable_python(default)
        elif isinstance(section, Section) and isinstance(completed.get(key), dict):
            completed[key] = _completed(completed[key], section)
    return completed


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each key that may not change and has changed."""
    if path in _MAY_CHANGE:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            inner = f"{path}.{key}" if path else key
            yield from _differences(before.get(key), now.get(key), inner)
    elif before != now:
        yield f"{path}: {quoted(before)} there, {quoted(now)} here"
