"""Run configuration: sections, model shapes, presets, loading."""
