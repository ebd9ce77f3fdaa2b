"""Token data: its preparation from documents, and the sequences and samples cut from it."""
