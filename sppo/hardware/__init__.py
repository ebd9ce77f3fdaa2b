"""Hardware descriptions: presets, files, and detection of the machine this process runs on."""
