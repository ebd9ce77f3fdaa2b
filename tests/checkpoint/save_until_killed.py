"""Saves a checkpoint in forked children and kills each at its n-th call that changes the disk.

Run as ``python -m tests.checkpoint.save_until_killed DIRECTORY NUMBER``. One process pays for
importing torch, then forks; the parent never computes, so the children inherit no threads. Prints
one JSON object per child: the last step whose save returned before the kill.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from sppo.checkpoint.checkpoint import CheckpointManager

KEEP = 2


def state_of(step):
    """1 MiB that names its step in every element."""
    return {f"model.layers.{i}.weight": torch.full((256, 256), float(step)) for i in range(4)}


def save_steps(directory, *, last, report, async_save=False):
    """Resume and save every step, telling ``report`` (a pipe) each step that is safe."""
    manager = CheckpointManager(directory, keep=KEEP, async_save=async_save)
    found = manager.latest_valid()
    first = 1 if found is None else found.step + 1
    for step in range(first, last + 1):
        manager.save(state_of(step), step=step, metadata={})
        manager.wait()
        os.write(report, step.to_bytes(8, "little"))


def run_child(work):
    """Fork and run ``work(pipe)``; the last step reported, and whether the child was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        work(writer)
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    reported = b""
    while part := os.read(reader, 1 << 16):
        reported += part
    os.close(reader)
    return int.from_bytes(reported[-8:], "little"), os.WIFSIGNALED(status)


def die_at_call(number):
    """Replace calls that change the disk by ones that kill this process at the ``number``-th.

    Nothing is flushed: what a killed process has written is not lost, unlike after a power failure.
    """
    left = [number]

    def wrap(name):
        real = getattr(os, name) if name != "fsync" else lambda descriptor: None

        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, counted)

    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        wrap(name)


def main(directory, number):
    """From two checkpoints, save a third and die at call 0, 1, ... until a save gets through.

    Every other child saves in the background.
    """
    template = directory / "template"
    run_child(lambda pipe: save_steps(template, last=2, report=pipe))
    for call in range(number):
        copy = directory / f"call_{call}"
        shutil.copytree(template, copy)

        def work(pipe, call=call, copy=copy):
            die_at_call(call)
            save_steps(copy, last=3, report=pipe, async_save=call % 2 == 1)

        step, killed = run_child(work)
        print(json.dumps({"call": call, "step": step, "killed": killed}), flush=True)
        if not killed:
            return


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
