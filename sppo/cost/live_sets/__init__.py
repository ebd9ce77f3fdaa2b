"""Tensors that are live while a subsequence runs on a device: its working set, exactly."""
