"""Opening of the token data that a run names, checked against its model. Needs no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sppo.config import RunConfig
from sppo.config.model import ModelConfig
from sppo.data.preparation.opening import reading
from sppo.data.preparation.tokenizer_file import TOKENIZER_FILE, vocabulary_identity
from sppo.data.samples.run_samples import table_of, why_no_sample
from sppo.data.tokens import META_FILE, TokenData, open_tokens, read_meta

_OTHER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
)
"""Tokenizer files of other formats, which only show that a model has a tokenizer."""


def open_data(run: RunConfig, directory: str) -> TokenData:
    """Open token data, and check that the run's model and sequence length can use it.

    Raises:
        ValueError: The data is missing or damaged, is of another tokenizer than the weights, has
            ids beyond the vocabulary, or is shorter than a sequence.
    """
    data = open_tokens(Path(directory))
    check_tokenizer(data, run.model)
    check_tokens(run, data)
    return data


def open_sources(run: RunConfig) -> tuple[TokenData, ...]:
    """Open the training tokens of a run, of each source; they were checked before.

    Raises:
        ValueError: The data is missing or damaged.
    """
    return tuple(open_tokens(Path(directory)) for directory in run.data.directories.values())


def open_evaluated(run: RunConfig) -> TokenData:
    """Open the tokens that ``sppo eval`` reads: ``data.eval_tokens``, or else ``data.tokens``.

    Raises:
        ValueError: See :func:`open_data`; or the vocabulary is not that of the training tokens, or
            a run of a mixture names no tokens to evaluate on.
    """
    directory = run.data.eval_tokens or run.data.tokens
    if directory is None:
        raise ValueError(
            "data.eval_tokens (missing): on which tokens? A run of data.sources evaluates on those "
            "of data.eval_tokens: write data.eval_tokens=DIR"
        )
    data = open_data(run, directory)
    key, training = next(iter(run.data.directories.items()))
    check_same_vocabulary(data, Path(training), keys=("data.eval_tokens", key))
    return data


def check_tokens(run: RunConfig, tokens: TokenData) -> None:
    """Raise ValueError unless the run's model can read the tokens, and there is a sample.

    Raises:
        ValueError: Some rules are broken; lists all of them, one per line.
    """
    problems = []
    meta, vocab_size = tokens.meta, run.model.vocab_size
    if meta.max_id >= vocab_size:
        problems.append(
            f"{tokens.directory}: ids up to {meta.max_id} (tokenizer {meta.tokenizer.name}, "
            f"vocabulary of {meta.vocab_size}), but model.vocab_size is {vocab_size}; an id must "
            f"be below it. Set model.vocab_size to at least {meta.max_id + 1}, or prepare the data "
            "with the model's tokenizer"
        )
    if meta.is_chat and run.data.samples == "stream" and not run.data.isolate_documents:
        problems.append(
            f"{tokens.directory}: chats, which would attend to each other in a stream; write "
            "data.isolate_documents=true, or data.samples=documents, with train.samples_per_step "
            "in place of train.sequences_per_step (samples: documents in a set of a validation, "
            "--samples documents for sppo eval)"
        )
    if table_of(run, tokens).num_samples == 0:
        problems.append(why_no_sample(run, tokens))
    if problems:
        raise ValueError("\n".join(problems))


def check_tokenizer(data: TokenData, model: ModelConfig) -> None:
    """Raise ValueError unless ``data`` has the vocabulary of the weights that a run starts from.

    Weights of ``model.from_hf`` were trained with the tokenizer in that directory. Nothing is
    checked for random weights, which can learn any vocabulary, for data of ready-made ids, whose
    vocabulary is unknown, and if no readable vocabulary is found.

    Raises:
        ValueError: The tokens are of another vocabulary.
    """
    if model.from_hf is None or data.meta.tokenizer.name == "ids":
        return
    directory = Path(model.from_hf)
    ours, path = data.meta.tokenizer, directory / TOKENIZER_FILE
    if not path.is_file():
        others = [name for name in _OTHER_FILES if (directory / name).is_file()]
        if others and ours.sha256 is None:
            raise _refusal(data, directory, theirs=str(directory / others[0]), size=None)
        return
    with reading(path):
        content = path.read_bytes()
    if ours.sha256 == hashlib.sha256(content).hexdigest():
        return
    theirs = vocabulary_identity(content)
    if theirs is None and ours.sha256 is not None:
        return
    if theirs is None or theirs.sha256 != ours.vocabulary_sha256:
        size = None if theirs is None else theirs.size
        raise _refusal(data, directory, theirs=str(path), size=size)


def check_same_vocabulary(tokens: TokenData, training: Path, *, keys: tuple[str, str]) -> None:
    """Raise ValueError unless tokens have the vocabulary of the training tokens.

    Nothing is checked if either data set has ready-made ids, whose vocabulary is unknown.

    Args:
        tokens: Tokens to evaluate on, or of another source of a mixture.
        training: Directory of the training tokens; nothing is checked if it has none.
        keys: Keys of the run file that name the two directories.

    Raises:
        ValueError: The tokens are of different vocabularies.
    """
    meta = training / META_FILE
    if not meta.is_file():
        return
    with reading(meta):
        theirs = read_meta(meta).tokenizer
    ours = tokens.meta.tokenizer
    if "ids" in (ours.name, theirs.name) or ours.sha256 == theirs.sha256:
        return
    if ours.vocabulary_sha256 is None or ours.vocabulary_sha256 != theirs.vocabulary_sha256:
        raise ValueError(
            f"{keys[0]} {tokens.directory} are tokens of tokenizer {ours.name}, and the run is "
            f"trained on those of {theirs.name} in {training}: prepare the former again, with the "
            f"tokenizer of {keys[1]}"
        )


def _refusal(data: TokenData, directory: Path, *, theirs: str, size: int | None) -> ValueError:
    ours = data.meta.tokenizer
    size_text = "" if size is None else f" (vocabulary of {size})"
    return ValueError(
        f"{data.directory}: tokens of tokenizer {ours.name} (vocabulary of {data.vocab_size}), but "
        f"the weights of model.from_hf={directory} know the ids of {theirs}{size_text}. Prepare "
        f"the data with that: sppo data prepare --tokenizer {directory / TOKENIZER_FILE} --out DIR "
        "FILE...; or start from random weights, with model.preset in place of from_hf. If the "
        f"weights were made for these tokens, put their tokenizer.json into {directory}"
    )
