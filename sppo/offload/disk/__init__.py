"""Files on a disk that hold offloaded tensors, and the free space of disks."""
