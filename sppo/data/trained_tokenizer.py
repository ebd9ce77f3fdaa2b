"""The tokenizer and the chat template that a run was trained with, for the model it is exported as.

They are kept with the tokens. A model that is served with another template than it was trained
with reads prompts that it has never seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sppo.config.json_file import read_json
from sppo.data.chat.template import TEMPLATE_FILE, ChatTemplate
from sppo.data.preparation.tokenizer_file import TOKENIZER_FILE, read_files
from sppo.data.tokens import META_FILE, TOKENIZER_FILES, read_meta
from sppo.model.huggingface.extras import Extras
from sppo.quoting import one_line

_SETTINGS = "tokenizer_config.json"
_GENERATION = "generation_config.json"
_END = "eos_token_id"
_PLAIN_SETTINGS = b'{"tokenizer_class": "PreTrainedTokenizerFast"}'
"""Settings of a tokenizer without any: without them it is taken for one of the model's family."""


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    """Tokenizer of token data, and the template of its chats."""

    directory: Path
    """The token data."""
    files: Mapping[str, bytes]
    """Contents of its files by name."""
    ends: tuple[int, ...]
    """Ids that end a text: the one after documents, and the one that stops an answer."""

    @property
    def template(self) -> bytes | None:
        """The template of its chats; None if the data are no chats."""
        return self.files.get(TEMPLATE_FILE)


def trained_tokenizer(directories: Sequence[Path]) -> TrainedTokenizer | None:
    """Return what is kept with the tokens that a run was trained on; None if nothing is.

    Of several sources, that of chats.

    Args:
        directories: Token data of the run; some may be gone by now.

    Raises:
        ValueError: Sources have different templates, or a file is damaged.
    """
    kept = [_kept_in(path) for path in directories if (path / TOKENIZER_FILE).is_file()]
    chats = [one for one in kept if one.template is not None]
    for other in chats[1:]:
        if other.template != chats[0].template:
            raise ValueError(
                f"{chats[0].directory} and {other.directory}: chats of two templates, and a model"
                f" has one; choose with --tokenizer {chats[0].directory}"
            )
    return next(iter(chats or kept), None)


def with_trained(base: Extras, trained: TrainedTokenizer) -> Extras:
    """Return the extras of a model that was trained with a tokenizer and its template.

    Texts also end with the ids that ended those that were trained on.
    """
    files = {**base.files, **trained.files}
    settings = json.loads(files.get(_SETTINGS, _PLAIN_SETTINGS))
    if trained.template is not None:  # some programs read the settings alone
        settings["chat_template"] = trained.template.decode()
    files[_SETTINGS] = _json(settings)
    ids = dict(base.token_ids)
    if ends := _ends(ids.get(_END), trained.ends):
        ids[_END] = ends
    if _GENERATION in files:
        generation = json.loads(files[_GENERATION])
        if ends := _ends(generation.get(_END), trained.ends):
            files[_GENERATION] = _json({**generation, _END: ends})
    there = {"tokenizer", *ids, *(("chat template",) if trained.template is not None else ())}
    return replace(
        base,
        files=dict(sorted(files.items())),
        token_ids=ids,
        missing=tuple(name for name in base.missing if name not in there),
        endless="" if trained.ends else base.endless,
    )


def template_change(base: Extras, trained: TrainedTokenizer) -> str | None:
    """Return how the template that was trained with compares to the base's, as text.

    None if there is no such template.
    """
    if trained.template is None:
        return None
    settings = json.loads(base.files.get(_SETTINGS, b"{}"))
    theirs = base.files.get(TEMPLATE_FILE) or settings.get("chat_template")
    text = theirs.decode() if isinstance(theirs, bytes) else theirs
    if text is None:
        compared = "the base has none"
    elif isinstance(text, str) and text.strip() == trained.template.decode().strip():
        compared = "that of the base is the same"
    else:
        compared = "that of the base differs"
    return f"the one trained with, of {one_line(trained.directory)}; {compared}"


def _kept_in(directory: Path) -> TrainedTokenizer:
    files = read_files(directory, sorted(TOKENIZER_FILES))
    end = read_meta(directory / META_FILE).tokenizer.end_of_document
    ends = [] if end is None else [end]
    if TEMPLATE_FILE in files:
        stops = ChatTemplate.load(directory).stops[-1:]
        added = read_json(directory / TOKENIZER_FILE).get("added_tokens") or ()
        ends += [token["id"] for token in added if token["content"] in stops]
    return TrainedTokenizer(directory, files, tuple(ends))


def _ends(stated: Any, further: Sequence[int]) -> Any:
    """Return the ids that end a text, a number if there is one alone; None without any."""
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    every = list(dict.fromkeys([*ids, *further]))
    return every if len(every) > 1 else next(iter(every), None)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
