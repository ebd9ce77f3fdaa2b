"""The tokenizer and the template of a run's tokens in the model that it is exported as."""

import json
import shutil

import pytest
from transformers import AutoTokenizer, GenerationConfig

from sppo.checkpoint import checkpoint
from sppo.checkpoint.newest import Checkpoint
from sppo.cli.export_extras import new_end
from sppo.data.chat.template import CHATML, ChatTemplate
from sppo.data.preparation.prepare import prepare_tokens
from sppo.model.huggingface.extras import Extras
from sppo.model.initialize import initial_weights
from tests.cli.test_convert import MODEL, convert, run_config
from tests.data.chats import ASKED, write_tokenizer

OTHER = CHATML.replace("message.content", "message.content | trim")


@pytest.fixture
def tokens(tmp_path):
    """Token data with the tokenizer and template of chats beside them."""
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    (tmp_path / "a.txt").write_text("Hello")
    prepare_tokens([tmp_path / "a.txt"], tokenizer=str(folder), out=tmp_path / "tokens")
    for path in folder.iterdir():
        shutil.copy(path, tmp_path / "tokens")
    (tmp_path / "tokens" / "chat_template.jinja").write_text(CHATML)
    return tmp_path / "tokens"


@pytest.fixture
def export(tmp_path, monkeypatch):
    """Function that exports a run of token directories and a base model; returns its report."""

    def exported(*directories, base=None, words=(), code=0):
        config = run_config().model_dump(mode="json")
        config["model"]["from_hf"] = None if base is None else str(base)
        if len(directories) == 1:
            config["data"]["tokens"] = str(directories[0])
        else:
            config["data"]["sources"] = {
                str(i): {"tokens": str(d)} for i, d in enumerate(directories)
            }
        monkeypatch.setattr("sppo.cli.convert.check_any", lambda path: None)
        stored = Checkpoint(tmp_path, 1, {"config": config}), initial_weights(MODEL, seed=3)
        monkeypatch.setattr(checkpoint, "read_weights", lambda path: stored)
        done = convert("to-hf", tmp_path, tmp_path / "m", "--json", *words)
        assert done.exit_code == code, done.output
        return done.stderr if code else json.loads(done.stdout)

    return exported


def ids_of(folder, *tokens):
    return AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(tokens))


def test_a_model_of_random_weights_has_the_tokenizer_of_its_tokens(tokens, export, tmp_path):
    report = export(tokens)
    assert report["chat_template"] == f"the one trained with, of {tokens}; the base has none"
    assert report["copied"] == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["eos_token_id"] == ids_of(tokens, "</s>", "<|im_end|>")
    (tokens / "tokenizer_config.json").unlink()
    shutil.rmtree(tmp_path / "m")
    export(tokens)
    plain = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert plain.apply_chat_template(ASKED, tokenize=False) + "<|im_start|>assistant\n" == text
    assert plain(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert list(report["missing"]) == ["generation_config.json", "bos_token_id", "pad_token_id"]


@pytest.mark.parametrize(("text", "compared"), [(CHATML, "is the same"), (OTHER, "differs")])
def test_the_template_trained_with_replaces_that_of_the_base(
    text, compared, tokens, export, tmp_path
):
    base = write_tokenizer(tmp_path / "base", text)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_k": 5}))
    (base / "config.json").write_text(json.dumps({"eos_token_id": 7, "bos_token_id": 3}))
    report = export(tokens, base=base)
    assert report["chat_template"].endswith(f"; that of the base {compared}")
    written = tmp_path / "m"
    settings = json.loads((written / "tokenizer_config.json").read_text())
    assert (written / "chat_template.jinja").read_text() == settings["chat_template"] == CHATML
    assert ChatTemplate.load(written).text == CHATML
    ends = [7, *ids_of(tokens, "</s>", "<|im_end|>")]
    assert GenerationConfig.from_pretrained(written).eos_token_id == ends
    assert GenerationConfig.from_pretrained(written).top_k == 5
    assert json.loads((written / "config.json").read_text())["eos_token_id"] == ends


def test_sources_have_one_template(tokens, export, tmp_path):
    other = shutil.copytree(tokens, tmp_path / "other")
    (other / "chat_template.jinja").write_text(OTHER)
    stderr = export(tokens, other, code=2)
    assert f"{tokens} and {other}: chats of two templates" in stderr
    (other / "chat_template.jinja").unlink()
    assert export(other, tokens)["chat_template"].startswith(f"the one trained with, of {tokens};")


def test_a_chosen_tokenizer_is_taken_as_it_is(tokens, export, tmp_path):
    chosen = write_tokenizer(tmp_path / "chosen", OTHER)
    report = export(tokens, words=("--tokenizer", chosen))
    assert report["chat_template"] is None
    assert json.loads((tmp_path / "m/tokenizer_config.json").read_text())["chat_template"] == OTHER
    assert not (tmp_path / "m/chat_template.jinja").exists()


def test_tokens_that_are_gone_are_named(tokens, export, tmp_path):
    shutil.rmtree(tokens)
    base = write_tokenizer(tmp_path / "base", CHATML)
    report = export(tokens, base=base)
    assert report["chat_template"].startswith("that of the base, if it has one: ")
    assert str(tokens) in report["chat_template"]
    assert "chat_template.jinja" not in report["copied"]


@pytest.mark.parametrize(("trained", "told"), [([7, 9], [7, 9]), (7, None), (None, None)])
def test_an_adapter_whose_base_ends_texts_in_another_way(trained, told, tmp_path):
    base = write_tokenizer(tmp_path / "base", CHATML)
    (base / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    ends = {} if trained is None else {"eos_token_id": trained}
    assert new_end(Extras(token_ids=ends), base=str(base)) == told
