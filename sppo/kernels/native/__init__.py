"""The CPU allocator built from `csrc`, and memory of the machine and of the process."""
