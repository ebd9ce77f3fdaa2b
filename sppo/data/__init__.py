"""Token data: documents, tokenizers, token directories, and the sequences cut from them."""
