"""Labels of rows, equal to those that TRL's trainer makes of the same rows."""

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sppo.data.tokens import open_tokens
from tests.data.chats import CALLED, REASONED, TOOLS, template, write_tokenizer
from tests.data.rows import ASKED, prepared, write_rows

pytestmark = pytest.mark.exhaustive

TURNS = [
    *ASKED,
    {"role": "user", "content": "More — 日本?"},
    {"role": "assistant", "content": "é 2"},
]
ONE_CALL = [*CALLED[:3], *CALLED[5:]]
"""Calls with other arguments would get those of each other, without values, in a table."""
ROWS = {
    "text": [{"text": "all of it, é"}, {"text": "x"}],
    "strings": [{"prompt": "2+2=", "completion": " 4 é"}, {"prompt": "x", "completion": "a"}],
    "completions": [{"prompt": TURNS[:3], "completion": TURNS[3:], "tools": None},
                    {"prompt": ONE_CALL[:1], "completion": ONE_CALL[1:], "tools": TOOLS}],
    "messages": [{"messages": TURNS, "tools": None}, {"messages": REASONED},
                 {"messages": ONE_CALL, "tools": TOOLS}],
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_labels_are_those_of_trl(tmp_path, kind):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = write_tokenizer(tmp_path / "model", template("qwen3_training"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 1}  # fmt: skip
    trainer = trl.SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(ROWS[kind]),
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "out"), max_length=None, report_to="none", use_cpu=True,
            assistant_only_loss=kind == "messages", bf16=False,
        ),
    )  # fmt: skip
    data = open_tokens(prepared(model, write_rows(tmp_path / "x.jsonl", *ROWS[kind])).directory)
    assert len(trainer.train_dataset) == data.num_documents
    for number, row in enumerate(trainer.train_dataset):
        low, high = data.document_offsets[number : number + 2]
        assert data.ids(low, high).tolist() == row["input_ids"]
        counts = [label != -100 for label in row.get("labels", row["input_ids"])]
        assert data.counts(low, high).tolist() == counts
        assert all(counts) == (kind == "text"), "otherwise a part is masked"
