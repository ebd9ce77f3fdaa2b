"""Count the modules and classes on the path of a saved tensor, through a disk and back.

A small model trains one step on this CPU with half of its saved tensors offloaded to a disk, while
every call of a function of `sppo` is recorded, on all threads. On the path are the functions that

* decide which rows of a saved tensor stay or leave, their bytes, and their place in the file;
* hand the tensor to a store, and take it back;
* copy it to the disk and back, on whatever thread;

and their callers. Arithmetic and counters of memory are not on the path, nor is the reservation of
memory and files before the first tensor is saved. Prints the modules of these functions, and all
classes that are defined there.

    python scripts/saved_tensor_path.py
"""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import sppo

PACKAGE = Path(sppo.__file__).parent
PATH = {
    "StepPrograms.placements_of",
    "Engine._offload_schedule",
    "Stage.prepare",
    "OffloadStore.prepare",
    "ActivationLayout.tensor_rows",
    "Layer.forward.<locals>.save",
    "SavedTensors.save",
    "Executor._finish_offload",
    "Executor._start_reload",
    "SavedTensors.take",
    "SavedTensors.release",
    "Layer.recompute_missing_rows",
}
"""Functions that begin a part of the path, with all that they call."""
ASIDE = {
    *("SlotMemory.make_room", "LifoArenaStore.reserve"),  # reservations
    "Executor._restore_kv",  # K and V
    *("Stage._rotary", "Stage._attention", "visit"),  # arithmetic and weights
    *("HeldBytes.add_tensors", "HeldBytes.remove_tensors"),  # counters of memory
}
"""Functions that lead away from the path, with all that they call."""
ARITHMETIC = ("engine/attention/", "engine/providers/", "model/gradients", "model/rope")
TYPES = ("offload/queues/copy_queues.py",)
"""Modules of which the path uses only types: interfaces, and the orderings of copies."""
MODEL = {
    **{"vocab_size": 512, "hidden_size": 64, "num_layers": 4},
    **{"num_heads": 4, "num_kv_heads": 2, "mlp_size": 128},
}
LENGTH = 2048


def main() -> None:
    """Run the step, and print modules and classes."""
    modules = sorted({*recorded_modules(), *TYPES})
    classes = {module: classes_of(module) for module in modules}
    for module, names in classes.items():
        print(f"{module:<40} {', '.join(names)}")
    print(f"{len(modules)} modules, {sum(map(len, classes.values()))} classes")


def classes_of(module: str) -> list[str]:
    """Return the names of all classes defined in a module."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def recorded_modules() -> set[str]:
    """Return the modules of the functions on the path, as paths below `sppo`."""
    found: set[str] = set()
    main_thread, is_on = threading.current_thread(), threading.Event()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if not is_on.is_set() or event != "call" or _module(frame.f_code) is None:
            return
        calls = list(_calls(frame))
        if any(name in ASIDE or _is_arithmetic(module) for module, name in calls):
            return
        on_worker = threading.current_thread() is not main_thread
        if on_worker or any(name in PATH for _, name in calls):
            found.update(module for module, _ in calls)

    with tempfile.TemporaryDirectory() as directory, _one_step(Path(directory), record) as step:
        is_on.set()
        sys.setprofile(record)
        try:
            step()
        finally:
            sys.setprofile(None)
            is_on.clear()
    return found


@contextmanager
def _one_step(disk: Path, record: Any) -> Iterator[Any]:
    """Yield a function that runs a step, on a state whose threads record their calls."""
    from sppo.config import check_run
    from sppo.engine.unit import SequenceData
    from sppo.hardware.this_machine import detect_machine
    from sppo.kernels.native.machine_memory import memory_room
    from sppo.offload.disk.disk_room import usable_directory
    from sppo.planning.run_plan import plan_run
    from sppo.training.state import build_state

    run = check_run(
        {
            "model": MODEL,
            "data": {"tokens": "."},
            "sequence": {"length": LENGTH, "num_subsequences": 4},
            "activations": {"offload_ratio": 0.5, "disk": str(disk)},
        },
        source="scripts/saved_tensor_path.py",
    )
    plan = plan_run(
        run,
        hardware=detect_machine(),
        available_bytes=memory_room().least_bytes,
        disk_bytes=usable_directory(disk).usable_bytes,
    )
    tokens = torch.randint(MODEL["vocab_size"], (LENGTH + 1,))
    data = SequenceData(tokens[:-1], tokens[1:])
    threading.setprofile(record)
    state = build_state(run, plan=plan)
    try:
        yield lambda: state.engine.accumulate([data], [plan.boundaries])
    finally:
        threading.setprofile(None)
        state.close()


def _calls(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yield module and name of all functions of `sppo` on the stack."""
    while frame is not None:
        module = _module(frame.f_code)
        if module is not None:
            yield module, frame.f_code.co_qualname
        frame = frame.f_back


def _module(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def _is_arithmetic(module: str) -> bool:
    is_kernel = module.startswith("kernels/") and not module.startswith("kernels/native/")
    return is_kernel or module.startswith(ARITHMETIC)


if __name__ == "__main__":
    main()
