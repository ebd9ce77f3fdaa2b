"""Runs ``sppo`` in forked children, with the ranks that it starts, and hooks that break them.

One process pays for importing torch, then forks for every call; it never computes, so children
inherit no threads. Ranks are forked from their launcher. Run as ``python -m
tests.training.forked_sppo``: reads one JSON object per line, the arguments of
:meth:`ForkedSppo.__call__`, answers with one. A hook is a function of a module and its arguments,
called in the child before the command, such as :func:`in_step`.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from tests.unpainted import unpainted

ROOT = Path(__file__).parents[2]
_ON_SMALL_DISK = (
    *("unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",)), "sh", "-c"),
    *('mount -t tmpfs -o size=32m none "$DISK" && exec "$@"', "sh"),
)
_LOOK_EVERY_S = 0.01
_GONE_S = 2.0
"""Longest time for which processes of a call that has ended may be dying."""


@dataclass(frozen=True)
class Ended:
    """A call of ``sppo`` that is over."""

    returncode: int | None
    """Negative: the signal that killed it. None: it did not end in time, and was killed."""
    stdout: str
    stderr: str
    left_over: list[str]
    """Command lines of the processes that outlived the call, and were killed."""
    ended_s: float
    """When it ended, on the clock of ``time.monotonic``."""


class ForkedSppo:
    """The other end: starts the process and asks it.

    Args:
        disk: Directory on which the process, and what it forks, has a small disk in memory.
    """

    def __init__(self, *, disk=None):
        command = [sys.executable, "-m", "tests.training.forked_sppo"]
        self._process = subprocess.Popen(
            command if disk is None else [*_ON_SMALL_DISK, *command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "DISK": str(disk),
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "200",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },
        )
        self._process.stdout.readline()  # the small disk is there, and all is imported
        self.disk = None if disk is None else Path(f"/proc/{self._process.pid}/root{disk}")
        """The small disk, as this process sees it."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __call__(self, *argv, cwd, hook=None, env=None, limit_s=300.0, shuts_down=False):
        """``sppo argv`` in ``cwd``, after ``hook``: names of a module and function, arguments.

        ``shuts_down``: ranks end as an interpreter does, which takes as long as some steps; if not,
        they wait for their threads only.
        """
        request = {
            "argv": [str(word) for word in argv],
            "cwd": str(cwd),
            "hook": hook,
            "env": env or {},
            "limit_s": limit_s,
            "shuts_down": shuts_down,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=30)


class ForkedRank:
    """A rank that the launcher starts: the methods of ``subprocess.Popen`` that it calls."""

    shuts_down = False

    def __init__(self, command, *, env, stdout, pass_fds, **_):
        words = list(command[command.index("sppo") + 1 :])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.returncode = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank(words, parent, env=env, output=stdout, kept=pass_fds)
        os.setpgid(self.pid, self.pid)

    def poll(self):
        """Return the exit code, None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout):
        """Return the exit code once the process has ended."""
        until_s = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(_LOOK_EVERY_S)
        return self.returncode

    def send_signal(self, number):
        """Send a signal to the process unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


def _be_rank(words, parent, *, env, output, kept):
    """Be a rank: what a new process has is made, then the command runs; does not return."""
    from sppo.parallel.job.end_with_parent import end_with_parent

    os.setpgid(0, 0)
    end_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if output is not None:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, *kept):
            with suppress(OSError):  # the one that lists
                os.close(int(name))
    _be_sppo(words, shuts_down=ForkedRank.shuts_down)


def _be_sppo(words, *, shuts_down=False):
    """Be the command; does not return."""
    from sppo.__main__ import main

    sys.argv = ["sppo", *words]
    code = 0
    try:
        with unpainted():
            main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if shuts_down:
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()  # a background save ends before the process, as at a usual exit
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _be_child(request, stdout, stderr):
    """Be the command of a request in a session of its own; does not return."""
    from sppo.parallel.job import launch

    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    launch.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedRank})
    ForkedRank.shuts_down = request["shuts_down"]
    if request["hook"] is not None:
        module, function, arguments = request["hook"]
        getattr(importlib.import_module(module), function)(**arguments)
    _be_sppo(request["argv"])


def _answer(request):
    """Run a request in a forked child; return how it ended."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _be_child(request, out.fileno(), err.fileno())
        until_s = time.monotonic() + request["limit_s"]
        while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > until_s:
                break
            time.sleep(_LOOK_EVERY_S)
        returncode = os.waitstatus_to_exitcode(found[1]) if found[0] else None
        ended_s = time.monotonic()
        left_over = _killed(child)
        if returncode is None:
            os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return Ended(returncode, *texts, left_over, ended_s)


def _killed(session):
    """Kill the processes of a session that do not end by themselves; return their commands."""
    until_s = time.monotonic() + _GONE_S
    while (running := _processes(session)) and time.monotonic() < until_s:
        time.sleep(_LOOK_EVERY_S)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(running.values())


def _processes(session):
    """Return the command lines of the processes of a session that are no zombies, by id."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def in_step(step, signals, *, action=0):
    """Hook that sends the process ``signals`` before pass number ``action`` of step ``step``."""
    arguments = {"step": step, "action": action, "signals": signals}
    return __name__, signal_in_step.__name__, arguments


def signal_in_step(step, action, signals):
    """Send this process ``signals`` before pass number ``action`` of step number ``step``."""
    from sppo.engine.engine import Engine
    from sppo.training import trainer

    trainer.warm_up = lambda run, **_: None  # a step of another model, not to be counted
    steps = 0
    accumulate = Engine.accumulate

    def counting(engine, *args, before_action, **kwargs):
        nonlocal steps
        steps += 1
        actions = 0

        def counted(*now):
            nonlocal actions
            if steps == step and actions == action:
                for number in signals:
                    os.kill(os.getpid(), number)
            actions += 1
            before_action(*now)

        return accumulate(engine, *args, before_action=counted, **kwargs)

    Engine.accumulate = counting


def serve():
    """Answer requests until there are no more."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import rich.table
    import torch.distributed.checkpoint
    import torch.utils.serialization

    import sppo.cli.app
    import sppo.cli.train
    import sppo.config
    import sppo.training.devices.cpu_device
    import sppo.training.evaluation.evaluated_run
    import sppo.training.report
    import sppo.training.trainer

    del matplotlib, rich, sppo, torch
    answers = os.fdopen(os.dup(1), "w")
    gc.freeze()  # collections leave out what was imported
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line)).__dict__) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
