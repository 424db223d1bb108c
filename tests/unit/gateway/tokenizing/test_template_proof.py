"""Proven templates run inside the gateway. Templates with unbounded time or size must not be proven."""

# ruff: noqa: E501  # templates are single lines
from pathlib import Path

import pytest

from gateway.tokenizing.template_proof import unproven_reason
from gateway.tokenizing.templates import parsed
from tests import tool_templates
from tests.small_tokenizer import CHATML
from tests.unit.gateway.tokenizing import test_templates as styles

DEMO = Path(__file__).parents[4] / "models/spillway-demo/chat_template.jinja"
# Constructs of published templates that the other test templates lack.
MORE = """{%- macro text_of(content) -%}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for item in content %}{%- if item.type == 'text' %}{{- item.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- endmacro -%}
{%- set ns = namespace(is_first=false, system='', last=messages|length - 1) -%}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- if ns.is_first %}{%- set ns.system = ns.system + '\\n\\n' + message.content %}
    {%- else %}{%- set ns.system = ns.system + message.content %}{%- set ns.is_first = true %}{%- endif %}{%- endif %}
{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set builtin = builtin_tools | reject('equalto', 'code_interpreter') | list | join(', ') %}
{%- for message in messages[1:] %}
    {%- set content = text_of(message.content) %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
    {%- if tools is not none and message == users[-1] %}
        {{- '[AVAILABLE_TOOLS] [' }}{%- for tool in tools %}{{- tool | tojson }}
            {%- for key, value in tool.function.items() if key != 'return' %}{{- key + value | tojson }}{%- endfor %}
        {%- endfor %}
    {%- endif %}
    {%- if loop.last and ns.system %}{{- '[INST] ' + ns.system + content }}{%- else %}{{- content | trim }}{%- endif %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{%- endif %}
    {%- if messages[loop.index0 - 1].role != 'tool' or loop.previtem %}{{- strftime_now('%d %b %Y') }}{%- endif %}
{%- endfor %}"""
USUAL = {name: source for name, source in vars(tool_templates).items() if name.isupper()}
USUAL |= {name: getattr(styles, name) for name in ("LLAMA_3_STYLE", "QWEN_3_STYLE", "MISTRAL_STYLE")}
USUAL |= {"chatml": CHATML, "demo": DEMO.read_text(), "more": MORE}


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_ones_are_proven(name: str) -> None:
    assert unproven_reason(parsed(USUAL[name])) is None


@pytest.mark.parametrize(
    "source",
    [
        # time
        "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for i in range(10**6) %}{% endfor %}",
        "{% for m in messages %}{% for n in messages %}{% for o in messages %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for c in messages[0].content %}{% for d in messages[0].content %}{% endfor %}{% endfor %}",
        "{% for c in messages[0].content %}{% set x = messages[0].content | trim %}{% endfor %}",
        "{% for m in messages %}{% set x = messages | tojson %}{% endfor %}",
        "{% for m in messages %}{% for t in tools %}{% for u in tools %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{{ g(n) }}{% endmacro %}{% macro g(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% set f = raise_exception %}{{ f() }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ lipsum(n=1000) }}",
        # size
        "{{ 'a' * 10**9 }}",
        "{% set n = 1000000000 %}{{ 'a' * n }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ messages[0].content.replace('', messages[0].content) }}",
        "{{ messages[0].content | replace('a', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa') }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ messages | tojson | tojson | tojson | tojson }}",
        "{{ messages | map('replace', 'a', 'aaaaaaa') | list }}",
        "{{ strftime_now('%1000000000d') }}",
        "{% set a = messages[0].content %}" + "{% set a = a ~ a %}" * 30 + "{{ a }}",
        "{% set a = messages %}" + "{% set a = [a, a] %}" * 30 + "{{ a | tojson }}",
        "{% set ns = namespace(s='a') %}{% for m in messages %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set n = namespace(s='a', t='b') %}{% for m in messages %}{% set n.s = n.s + n.t %}{% set n.t = n.t + n.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for m in messages %}{% set t = ns.s %}{% set ns.s = t + t %}{% endfor %}",
        "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + messages[0].content %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for m in messages %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% set x %}{% for m in messages %}{{ messages[0].content }}{% endfor %}{% endset %}",
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(s='a') %}{% for m in messages %}{% set n.s = f(n.s) %}{% endfor %}",
        "{% set ns = namespace(s=['a']) %}{% for m in messages %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for m in messages %}{% set ns.s = ns.s | replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for m in messages %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for m in messages %}{% set ns.s = ns.s | tojson %}{% endfor %}",
        "{{ [1, 2] * 1000000000 }}",
        "{% set n = 9 %}" + "{% set n = n * n %}" * 30,
        "{% for a in [1, 2] %}{% for b in [1, 2] %}{% for c in [1, 2] %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for a in 'aaaaaaaaaaaaaaa' %}{% for b in 'aaaaaaaaa' %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for a in [m, m, m, m, m, m, m, m, m] %}{% for b in [a, a, a, a, a, a, a, a, a] %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for c in messages[0].content %}{% if c is in(messages[1].content) %}{% endif %}{% endfor %}",
        "{% for c in messages[0].content %}{% if messages[1].content == messages[2].content %}{% endif %}{% endfor %}",
        "{% for c in messages[0].content %}{% set n = messages[1].content | int %}{% endfor %}",
        "{% set ns = namespace(s='') %}{% for m in messages %}{% for c in m.content %}{% set ns.s = ns.s + c %}{% endfor %}{% endfor %}",
        "{% set messages = messages[0].content %}{% for i in range(messages | length) %}{% set x = messages | trim %}{% endfor %}",
        "{% set a = messages %}" + "{% set a = [a] | string %}" * 30,
        "{% set a = messages %}" + "{% set a = [a] ~ '' %}" * 30,
        "{% macro f() %}{{ x }}{% endmacro %}{% set ns = namespace(s='') %}{% for x in messages %}{% set ns.s = ns.s + f() %}{% endfor %}",
        # unsupported constructs
        "{% include 'x' %}",
        "{% filter upper %}x{% endfilter %}",
        "{{ messages | wordwrap(1) }}",
        "{{ messages | sum(attribute='content') }}",
        "{{ messages[0].content.encode() }}",
        "{{ cycler(1)() }}",
    ],
)
def test_bombs_are_not(source: str) -> None:
    assert unproven_reason(parsed(source)) is not None
