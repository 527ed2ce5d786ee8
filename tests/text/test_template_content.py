"""Content as parts: what templates of the field make of it, and that none loses text. Written for these tests, in the
idioms of the published ones."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.text.chat_template import ChatTemplate
from tokenspeed.text.messages import in_parts
from tokenspeed.text.template_content import Shape, content_shape

ARGUMENTS = (
    "{% for c in m.tool_calls or [] %}{% if c.function.arguments is string %}S{% else %}O{% endif %}{% endfor %}"
)
EACH = "{% for m in messages %}"

TEMPLATES: dict[str, tuple[str, Shape]] = {
    "text": (EACH + "<{{ m.content }}>{% endfor %}", "text"),
    "qwen3": (
        EACH + "{% if m.content is string %}{% set content = m.content %}{% else %}{% set content = '' %}{% endif %}"
        "<{{ content }}>{% for w in content.split('|') %}{% endfor %}{% endfor %}",
        "text",
    ),
    "gpt-oss": (
        "{% for p in tools or [] %}{% if p.type is string %}{% endif %}{% endfor %}"
        + EACH
        + "<{{ m.content }}>{% endfor %}",
        "text",
    ),
    "loop alone": (EACH + "<{% for p in m.content %}{{ p.text }}{% endfor %}>" + ARGUMENTS + "{% endfor %}", "parts"),
    "set alone": (
        EACH + "{% set c = m.content %}<{% for p in c %}{{ p.text }}{% endfor %}>" + ARGUMENTS + "{% endfor %}",
        "parts",
    ),
    "smolvlm": (
        EACH + "<{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}"
        "{% endfor %}>{% endfor %}",
        "parts",
    ),
    "llava": (
        EACH + "<{% for content in m['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}"
        "{% endfor %}>{% endfor %}",
        "parts",
    ),
    "iterable": (
        EACH + "<{% if m['content'] is iterable %}{% for content in m['content'] %}{{ content['text'] }}{% endfor %}"
        "{% else %}{{ m['content'] }}{% endif %}>{% endfor %}",
        "parts",
    ),
    "qwen3-vl": (
        EACH + "<{% if m.content is string %}{{ m.content }}{% else %}{% for content in m.content %}"
        "{% if 'text' in content %}{{ content.text }}{% endif %}{% endfor %}{% endif %}>" + ARGUMENTS + "{% endfor %}",
        "either",
    ),
    "llama 4": (
        EACH + "<{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for content in m['content'] %}"
        "{% if content['type'] == 'text' %}{{ content['text'] | trim }}{% endif %}{% endfor %}{% endif %}>{% endfor %}",
        "either",
    ),
    "glm": (
        "{% macro visible_text(content) %}{% if content is string %}{{ content }}"
        "{% elif content is iterable and content is not mapping %}{% for item in content %}"
        "{% if item is mapping and item.type == 'text' %}{{ item.text }}{% elif item is string %}{{ item }}{% endif %}"
        "{% endfor %}{% endif %}{% endmacro %}" + EACH + "<{{ visible_text(m.content) }}>{% endfor %}",
        "either",
    ),
    "kimi": (
        "{% macro render(msg) %}{% set c = msg.get('content') %}{% if c is string %}{{ c }}{% else %}"
        "{% for content in c or [] %}{% if content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}"
        "{% endif %}{% endmacro %}" + EACH + "<{{ render(m) }}>{% endfor %}",
        "either",
    ),
    "mistral": (
        EACH + "<{% if m['content'] is string %}{{ m['content'] }}{% elif m['role'] == 'user' %}"
        "{% for block in m['content'] %}{{ block['text'] }}{% endfor %}{% else %}{{ m['content'][0]['text'] }}"
        "{% endif %}>{% endfor %}",
        "either",
    ),
}
STRING = [{"role": "user", "content": "What is 2+2?"}]
ONE = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
TWO = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]}]


def rendered(source: str, messages: list[dict[str, Any]], **arguments: Any) -> str:
    template = ChatTemplate({"default": source}, special_tokens={}, spellings=())
    return template.render(messages, add_generation_prompt=False, **arguments).text


@pytest.mark.parametrize("name", TEMPLATES)
def test_shape(name: str) -> None:
    source, shape = TEMPLATES[name]
    assert content_shape(jinja2.Environment().parse(source)) == shape


@pytest.mark.parametrize("name", TEMPLATES)
def test_parts_reach_templates_that_know_them(name: str) -> None:
    """The bug: any test for a string in a template that loops over content (of a call's arguments, say) made text of
    parts, of which the template showed nothing; and parts became text with a line end that nobody had sent."""
    source, shape = TEMPLATES[name]
    assert rendered(source, STRING) == "<What is 2+2?>"
    assert rendered(source, ONE) == "<2+2?>"
    if shape == "text":  # as vLLM and llama.cpp do
        assert rendered(source, TWO) == "<What is \n2+2?>"
        return
    assert rendered(source, TWO) == jinja2.Environment().from_string(source).render(messages=TWO)
    assert rendered(source, TWO) in ("<What is 2+2?>", "<What is2+2?>")


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "text"])
@pytest.mark.parametrize("role", ["system", "assistant"])
def test_no_template_loses_text(name: str, role: str) -> None:
    """Mistral's take the first part of a system message and of an assistant's."""
    text = rendered(TEMPLATES[name][0], [{**TWO[0], "role": role}, *STRING])
    assert all(part in text for part in ("What is", "2+2?"))


def test_a_template_that_fails_on_parts_gets_text() -> None:
    loops = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    source = EACH + "{% if m.role == 'user' %}" + loops + "{% else %}{{ m.content + '!' }}{% endif %}{% endfor %}"
    asks = "{% if messages[0].content is string %}{% endif %}" + source
    assert rendered(asks, [{**TWO[0], "role": "assistant"}]) == "What is \n2+2?!"
    shown = source.replace(" + '!'", "")  # as Python writes a list
    assert rendered(shown, [*STRING, {"role": "assistant", "content": "4"}]) == "What is 2+2?4"
    assert rendered(shown, [{**TWO[0], "role": "assistant"}]) == "What is \n2+2?"
    for written in ("{{ m.content | tojson }}", "{% for each in m.content %}{{ each.output or each }}{% endfor %}"):
        tool = "{% if m.content is string %}{{ m.content }}{% elif m.role == 'tool' %}" + written
        both = EACH + tool + "{% else %}" + loops + "{% endif %}{% endfor %}"  # GLM: a tool's list is several outputs
        user = {"role": "user", "content": in_parts(["a", "b"])}
        assert rendered(both, [{**TWO[0], "role": "tool"}, user]) == "What is \n2+2?ab"
    with pytest.raises(InvalidRequest, match="refuses the messages: no"):
        rendered(EACH + loops + "{{ raise_exception('no') }}{% endfor %}", TWO)


@pytest.mark.parametrize("name", ["text", "smolvlm", "qwen3-vl", "llama 4", "mistral"])
def test_an_answer_in_parts_goes_on(name: str) -> None:
    messages = [*STRING, {**TWO[0], "role": "assistant"}]
    text = rendered(TEMPLATES[name][0], messages, continue_final_message=True)
    assert text == "<What is 2+2?><What is \n2+2?"


def test_parts_of_other_apis_are_parts_of_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    assert rendered(TEMPLATES["smolvlm"][0], [{"role": "assistant", "content": parts}]) == "<abc>"
    assert rendered(TEMPLATES["smolvlm"][0], [{"role": "user", "content": []}, *ONE]) == "<><2+2?>"


@pytest.mark.parametrize("content", ["message['content']", "message.content"])
def test_templates_that_know_only_parts_get_parts(content: str) -> None:
    """They wrote a string letter by letter."""
    loop = f"{{% for part in {content} %}}({{{{ part.text or part }}}}){{% endfor %}}"
    parts = "{% for message in messages %}" + loop + "{% endfor %}"
    both = (
        "{% for message in messages %}{% if message.content is string %}S{% else %}" + loop + "{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}]
    for source, expected in ((parts, "(hi)(yo)"), (both, "S(yo)")):
        template = ChatTemplate({"default": source}, special_tokens={}, spellings=())
        assert template.render(messages).text == expected
    goes_on = ChatTemplate({"default": parts}, special_tokens={}, spellings=())
    assert goes_on.render(messages, add_generation_prompt=False, continue_final_message=True).text == "(hi)(yo"
