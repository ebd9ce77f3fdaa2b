"""Rows of files for tests, their preparation, and the documents that they became."""

import json

import numpy as np
from tokenizers import Tokenizer

from sppo.data.chat.template import CHATML
from sppo.data.preparation.prepare import prepare_tokens
from sppo.data.preparation.row_options import RowOptions
from sppo.data.tokens import open_tokens
from tests.data.chats import write_tokenizer

END = "</s>"
ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a — b"}]
SAID = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n«a — b<|im_end|>»\n"

UNMARKED = SAID.replace("«", "").replace("»", "")


def write_chatml_tokenizer(folder):
    return write_tokenizer(folder, CHATML + "<|im_start|><|im_end|>")


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(tokenizer, *files, out=None, **options):
    out = out or files[0].parent / "tokens"
    further = {name: options.pop(name) for name in ("held_out_out", "workers") if name in options}
    end = options.pop("end_of_document", "auto")
    return prepare_tokens(
        files, tokenizer=str(tokenizer), out=out, end_of_document=end, rows=RowOptions(**options),
        **further,
    )  # fmt: skip


def documents(tokenizer, directory):
    """For each document its text, with «» around what is trained on."""
    data, codec = open_tokens(directory), Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    found = []
    for low, high in zip(data.document_offsets[:-1], data.document_offsets[1:], strict=True):
        ids, counts = data.ids(low, high), data.counts(low, high)
        cuts = [0, *np.flatnonzero(np.diff(counts.astype(int))) + 1, len(ids)]
        text = ""
        for start, end in zip(cuts, cuts[1:], strict=False):
            piece = codec.decode(ids[start:end].tolist(), skip_special_tokens=False)
            text += f"«{piece}»" if counts[start] else piece
        found.append(text)
    return found
