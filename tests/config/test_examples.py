"""Every key of a run file has an example value, and every example is valid."""

import pytest
from pydantic import TypeAdapter

from sppo.config.examples import EXAMPLES
from sppo.config.loading import _section_class
from sppo.config.model import RopeScaling
from sppo.config.presets import PRESETS
from sppo.config.run import RunConfig
from sppo.config.yaml_file import parse_yaml

_NEEDED = {
    "model": {**PRESETS["tiny"], "num_heads": 32},
    "model.rope_scaling": {"type": "yarn", "original_max_positions": 1024, "factor": 2},
    "data": {"tokens": "data/code"},
    "sequence": {"length": 16384},
}
"""What the other keys of a section must say."""


def _classes():
    sections = {name: _section_class(name) for name in RunConfig.model_fields}
    return {**sections, "model.rope_scaling": RopeScaling}


def test_every_key_has_an_example():
    keys = {f"{name}.{key}" for name, cls in _classes().items() for key in cls.model_fields}
    assert set(EXAMPLES) == keys


@pytest.mark.parametrize("key", EXAMPLES)
def test_an_example_is_accepted_and_says_something(key):
    section, _, name = key.rpartition(".")
    cls = _classes()[section]
    value = parse_yaml(EXAMPLES[key], source=key)
    parsed = TypeAdapter(cls).validate_python({**_NEEDED.get(section, {}), name: value})
    got = getattr(parsed, name)
    field = cls.model_fields[name]
    same_as_default = {"model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"}
    same_as_default |= {"model.rope_scaling.beta_fast", "model.rope_scaling.beta_slow"}
    assert field.is_required() or got != field.default or key in same_as_default
