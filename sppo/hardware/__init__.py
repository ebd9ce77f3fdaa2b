"""Descriptions of machines: figures, presets, files, and the machine this process runs on."""
