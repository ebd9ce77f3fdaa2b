"""Keys of other programs lead to the keys of the run file, in errors as in the documentation."""

import re

import pytest

from sppo.config.other_names import NAMES, words_about
from sppo.config.problems import KEY_PATHS, RUN_KEYS
from tests.documents import ROOT

_PAGE = (ROOT / "docs/howto/coming_from.md").read_text()
_HERE = re.compile(r"[a-z]+\.[a-z_]+|same command|no dropout|`adapter`")


def _names_of_the_page():
    """Each name of another program on the page, and the keys of which one is it here."""
    for section in ("Run", "Adapters"):
        text = _PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        for *names, here in (line.strip("| ").split(" | ") for line in text.split("\n") if line):
            for name in re.findall(r"`([a-z_0-9]+)`", " ".join(names)):
                yield name, [key.strip("`") for key in _HERE.findall(here)]


def test_the_page_and_the_error_lead_to_the_same_key():
    wrong, names = {}, {name: keys for name, keys in _names_of_the_page() if keys}
    del names["model"]  # a section here
    for name, keys in names.items():
        said = words_about(name) or words_about(f"adapter.{name}") or str(KEY_PATHS.get(name))
        if not any(key in said for key in keys):
            wrong[name] = (keys, said)
    assert len(names) > 40
    assert not wrong


def test_the_words_name_keys_that_exist():
    paths = re.findall(r"\b(\w+)\.(\w+)", " ".join(NAMES))
    assert len(paths) > 20
    assert not [(section, key) for section, key in paths if key not in RUN_KEYS[section]]


def test_a_key_of_the_run_file_in_the_wrong_section_leads_to_its_own():
    shadowed = {key: words_about(key) for key in KEY_PATHS if words_about(key)}
    assert not [key for key, said in shadowed.items() if KEY_PATHS[key][0] not in said]


@pytest.mark.parametrize(
    ("path", "here"),
    [
        ("parallel.context_parallel_degree", "sequence_parallel=ulysses"),
        ("parallel.tensor_parallel_degree", "sequence_parallel=megatron"),
        ("parallel.data_parallel_shard_degree", "parallel.zero=3"),
        ("train.gradient_checkpointing", "activations.policy"),
        ("max_length", "sequence.length"),
        ("train.micro-batch-size", "train.sequences_per_step"),
        ("optimizer.offload", "state.optimizer=host"),
    ],
)
def test_a_name_leads_to_its_key(path, here):
    assert here in words_about(path)
