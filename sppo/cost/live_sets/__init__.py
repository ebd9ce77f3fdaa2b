"""Live sets of a subsequence on a device, whose largest is its working set, in exact bytes."""
