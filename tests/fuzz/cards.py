"""Model cards, up to where a template that is not proven would be rendered in a process of its own."""

import contextlib

import jinja2
from msgspec.structs import replace

from gateway.errors import InvalidParameter
from gateway.tokenizing.cards import _PROBE, UnusableCard, _unproven_reason, check_context_length
from gateway.tokenizing.templates import ChatTemplate
from protocol import job as m
from protocol.dialects.dialect import Dialect
from protocol.errors import ProtocolError
from tests.fuzz.mutations import Form
from tests.small_tokenizer import CHATML
from tests.unit.protocol.test_versions import CARD

FORM: Form = "msgpack"

_TEMPLATES = [
    CHATML,
    (
        "{%- macro say(x) %}{{ x|trim }}{% endmacro %}{% set ns = namespace(a='') %}{% for m in messages %}"
        "{% if m['role'] == 'user' %}{{ bos_token + say(m.content) }}{% elif loop.first %}{{ raise_exception('no') }}"
        "{% else %}{% set ns.a = ns.a ~ m.content %}{% endif %}{% endfor %}{{ ns.a[:10] }}"
    ),
    "{{ messages | tojson }}{% for t in tools or [] %}{{ t.function.name }}<tool_call>{% endfor %}",
    "{% set x = messages[0].content.split('</think>')[-1] if messages is defined else none %}{{ x }}{{ 2 ** 3 // 2 }}",
]
SEEDS = [
    m.encode(replace(CARD, chat_template=source, special_tokens={"bos_token": "<s>"}, revision="r"))
    for source in _TEMPLATES
]


def run(payload: bytes) -> None:
    try:
        card = m.decode_model_card(payload)
        check_context_length(card.context_length)
    except (ProtocolError, UnusableCard):
        return
    for source in (card.chat_template, card.tool_template):
        if source:
            _read(source, card)


def _read(source: str, card: m.ModelCard) -> None:
    Dialect.of(source, {})
    with contextlib.suppress(jinja2.TemplateSyntaxError):
        if _unproven_reason(source) is not None:
            return
        template = ChatTemplate(source, card.special_tokens)
        with contextlib.suppress(InvalidParameter):
            template.render(_PROBE)
