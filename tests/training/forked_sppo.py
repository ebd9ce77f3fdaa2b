"""Runs ``sppo`` in forked children and sends them signals at an exact moment of an exact step.

One process pays for importing torch, then forks for every call; it never computes, so children
inherit no threads. Run as ``python -m tests.training.forked_sppo``: reads one JSON object per line
(``argv``, ``cwd``, ``env``, and ``step``, ``action``, ``signals`` or nulls), answers with one.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.unpainted import unpainted

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """A call of ``sppo`` that is over."""

    returncode: int
    """Negative: the signal that killed it."""
    stdout: str
    stderr: str


class ForkedSppo:
    """The other end: starts the process and asks it."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.forked_sppo"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )

    def __call__(self, *argv, cwd, step=None, action=0, signals=(), env=None):
        """``sppo argv`` in ``cwd``; sends itself ``signals`` before pass ``action`` of ``step``."""
        request = {
            "argv": [str(word) for word in argv],
            "cwd": str(cwd),
            "step": step,
            "action": action,
            "signals": list(signals),
            "env": env or {},
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=30)


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


def run_child(request, stdout, stderr):
    """Be ``sppo``; does not return."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if request["step"] is not None:
        signal_in_step(request["step"], request["action"], request["signals"])
    from sppo.__main__ import main

    sys.argv = ["sppo", *request["argv"]]
    code = 0
    try:
        with unpainted():
            main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    from concurrent.futures import thread

    thread._python_exit()  # a background save ends before the process, as at a usual exit
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve():
    """Answer requests until there are no more."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import rich.table

    import sppo.cli.app
    import sppo.config
    import sppo.training.devices.cpu_device
    import sppo.training.evaluation.evaluated_run
    import sppo.training.report
    import sppo.training.trainer

    del matplotlib, rich, sppo
    answers = os.fdopen(os.dup(1), "w")
    gc.freeze()  # collections leave out what was imported
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                run_child(request, out.fileno(), err.fileno())
            _, status = os.waitpid(child, 0)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        answer = {
            "returncode": os.waitstatus_to_exitcode(status),
            "stdout": texts[0],
            "stderr": texts[1],
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
