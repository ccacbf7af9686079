"""Chat templates: what they get, and what they cannot do."""

from __future__ import annotations

import pytest

from splitup.client.text.chat_template import check_template, render_chat
from splitup.core.errors import InvalidInput, InvalidModel

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = [{"role": "user", "content": " hi "}]


def render(template: str) -> str:
    return render_chat(USER, template=template, bos_token="<s>", eos_token="</s>")


def test_a_conversation_ends_where_the_answer_begins() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}") == "<s> hi </s>"
    assert render('{{ {"a": "ü"} | tojson }}') == '{"a": "ü"}'


def test_marks_for_training_mark_nothing() -> None:
    said = "{{ message.content | trim }}"
    inner = "{% generation %}{% set x = message.content %}{{ x | trim }}{% endgeneration %}"
    marked = CHATML.replace(said, inner)
    assert render(marked) == render(CHATML)
    assert render("{% generation %}{% set x = 1 %}{% endgeneration %}{{ x is defined }}") == "False"


def test_a_template_says_what_it_refuses() -> None:
    with pytest.raises(InvalidInput, match="refuses the messages: only two roles"):
        render("{{ raise_exception('only two roles') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'] }}",
        "{% include '/etc/passwd' %}",
        "{{ missing.field }}",
        "{{ range(10**9) | list }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_hostile_template_reaches_nothing(template: str) -> None:
    with pytest.raises(InvalidInput, match="chat template failed"):
        render(template)


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ " + "1+" * 30_000 + "1 }}", "{{ " + "(" * 30_000]
)
@pytest.mark.usefixtures("raised_recursion_limit")
def test_a_template_that_cannot_be_compiled_is_refused(template: str) -> None:
    with pytest.raises(InvalidModel, match="not valid Jinja"):
        check_template(template)
    with pytest.raises(InvalidModel, match="not valid Jinja"):
        render(template)
