"""Count of the allocations of torch's CPU allocator during a call, temporaries included."""

import torch


def _events(run):
    """Signed bytes of every allocation and release, in order."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler saw no allocation"
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def allocated_bytes(run):
    """Bytes of all allocations together."""
    return sum(size for size in _events(run) if size > 0)


def peak_bytes(run):
    """Most bytes held at once, above what was there before."""
    held = peak = 0
    for size in _events(run):
        held += size
        peak = max(peak, held)
    return peak
