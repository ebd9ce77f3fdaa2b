"""Stores of saved activations, and the copies between the device, host memory and disk."""
