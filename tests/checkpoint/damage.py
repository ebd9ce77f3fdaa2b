"""Damage to files that checksums must find."""

import os


def flip_a_bit(path):
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    """The second half is gone."""
    os.truncate(path, path.stat().st_size // 2)
