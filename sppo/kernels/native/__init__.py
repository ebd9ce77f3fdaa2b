"""The native library built from `csrc`: loading, CPU allocator, file functions, memory limits."""
