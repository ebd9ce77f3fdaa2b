"""The native library that `csrc` is built into: finding it, its allocator, its file functions."""
