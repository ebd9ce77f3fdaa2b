"""Run configuration: sections, model shapes, presets and loading."""

from sppo.config.loading import check_run, load_run, run_sections
from sppo.config.model import ModelConfig, RopeScaling
from sppo.config.model.presets import PRESETS
from sppo.config.problems import ConfigError, Problem
from sppo.config.run import RunConfig

__all__ = [
    "PRESETS",
    "ConfigError",
    "ModelConfig",
    "Problem",
    "RopeScaling",
    "RunConfig",
    "check_run",
    "load_run",
    "run_sections",
]
