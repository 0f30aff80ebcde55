"""A gauge of memory on the CPU."""

from torch.profiler import ProfilerActivity, profile


def peak_allocated(fn) -> int:
    """The most bytes that `fn` holds at a time in tensors it allocates, on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn()
    held = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
