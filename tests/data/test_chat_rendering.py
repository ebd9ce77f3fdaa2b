"""Templates that would not end, or reach out of their sandbox; and where templates stand."""

import json
from datetime import date

import pytest
from transformers import AutoTokenizer

from sppo.data.chat import rendering as chat_rendering
from sppo.data.chat.conversation import Chat
from sppo.data.chat.rendering import RenderingError, render
from sppo.data.chat.template import ChatTemplate
from tests.data.chats import ASKED, TOOLS, write_tokenizer

TODAY = date(2024, 7, 26)
GROWING = """\
{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = GROWN %}{% endfor %}"""


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) + m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ range(10 ** 9) }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ lipsum(n=10 ** 9) }}",
        GROWING.replace("GROWN", "ns.s + ns.s"),
        GROWING.replace("GROWN", "ns.s ~ ns.s"),
        GROWING.replace("GROWN", "ns.s | replace('a', ns.s)"),
        GROWING.replace("GROWN", "ns.s.replace('a', ns.s)"),
        GROWING.replace("GROWN", "ns.s.join(ns.s)"),
        GROWING.replace("GROWN", "[ns.s, ns.s]") + "{{ ns.s }}",
        GROWING.replace("GROWN", "(ns.s, ns.s)") + "{{ ns.s | length }}",
        GROWING.replace("GROWN", "{'a': ns.s, 'b': [ns.s]}") + "{{ ns.s | tojson }}",
        GROWING.replace("GROWN", "dict(a=ns.s, b=ns.s)") + "{{ ns.s | string }}",
        GROWING.replace("= GROWN %}", "%}{{ ns.s }}{{ ns.s }}{% endset %}"),
        "{{ ('a\\n' * 100000) | indent(width=100000) }}",
        "{{ ('\\t' * 100000).expandtabs(100000) }}",
        GROWING.replace("'aa'", "9").replace("GROWN", "ns.s * ns.s"),
        "{% for i in range(99999) %}{{ 'many words ' * 9999 }}{% endfor %}",
    ],
)
def test_renderings_are_bounded(text, monkeypatch):
    monkeypatch.setattr(chat_rendering, "MOST_STEPS", 10_000)
    with pytest.raises(RenderingError):
        render(text, {"messages": [1]}, today=TODAY)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__closure__[0] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ open('/etc/passwd') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_templates_stay_in_the_sandbox(text):
    with pytest.raises(RenderingError):
        render(text, {"messages": [1]}, today=TODAY)


def test_time_of_a_rendering_is_the_date(tmp_path):
    text = "{{ strftime_now('%d %b %Y') }} {{ strftime_now('%H:%M') }}"
    assert render(text, {}, today=TODAY)[0] == "26 Jul 2024 00:00"
    folder = write_tokenizer(tmp_path, text)
    asked = Chat(tuple(ASKED))
    for day in ("2026-01-02", "02 Jan 2026"):
        marked = ChatTemplate.load(folder, date=day).marked(asked, "all")
        assert marked.text == "02 Jan 2026 00:00"
    with pytest.raises(ValueError, match="--date tomorrow: write a day as"):
        ChatTemplate.load(folder, date="tomorrow")


def test_template_of_a_file_and_of_the_settings(tmp_path):
    folder = write_tokenizer(tmp_path, "{{ eos_token }} settings")
    chat = Chat(tuple(ASKED))

    def rendered(option=None):
        return ChatTemplate.load(folder / "tokenizer.json", option).marked(chat, "all").text

    assert rendered() == "</s> settings"
    (folder / "chat_template.jinja").write_text("{{ bos_token }} file")
    assert rendered() == "<bos> file"
    (tmp_path / "other").write_text("other")
    assert rendered(str(tmp_path / "other")) == "other"
    assert rendered("chatml").startswith(
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user"
    )


def test_named_templates_are_chosen_as_in_transformers(tmp_path):
    folder = write_tokenizer(tmp_path, "")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    texts = {"default": "\n  plain\n", "tool_use": "\n\ntools {% if 1 %}\n{% endif %}\n  "}
    settings["chat_template"] = [{"name": k, "template": v} for k, v in texts.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    made, theirs = ChatTemplate.load(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOLS):
        text = theirs.apply_chat_template(list(ASKED), tools=tools, tokenize=False)
        assert made.marked(Chat(tuple(ASKED), tools=tools), "all").text == text
    settings["chat_template"] = [{"name": "rag", "template": ""}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="no entry called default, only rag"):
        ChatTemplate.load(folder)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (None, r"this tokenizer has no chat_template; give --chat-template FILE, or chatml"),
        ("chatm", r"--chat-template chatm: neither chatml nor a file"),
        ("bad.jinja", r"bad.jinja: line 2 of the chat template: Unexpected end"),
    ],
)
def test_templates_that_cannot_be_used(option, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_text("\n{% for a in b %}")
    folder = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=message):
        ChatTemplate.load(folder, option)
