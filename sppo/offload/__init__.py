"""Stores of saved activations, and the copies that offload them and bring them back."""
