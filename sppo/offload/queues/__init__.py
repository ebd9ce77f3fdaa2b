"""Copy queues: ordered asynchronous copies between the device, host memory and disk."""
