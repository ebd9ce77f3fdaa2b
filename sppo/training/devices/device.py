"""Device of a rank: the operations of training that differ between a CPU and a GPU.

The trainer calls the same methods of either instead of testing the kind of device.
"""

from __future__ import annotations

from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.cuda_device import CudaDevice

Device = CpuDevice | CudaDevice
