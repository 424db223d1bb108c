"""Rendered text and token ids equal those of transformers, for templates of several model families."""

import time
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gateway.errors import InvalidParameter
from gateway.tokenizing.encoders import HuggingFaceEncoder
from gateway.tokenizing.templates import ChatTemplate
from tests.small_tokenizer import BOS, CHATML, EOS, byte_tokenizer, byte_tokenizer_json

LLAMA_3_STYLE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if strftime_now is defined %}{{- "Year: " + strftime_now("%Y")[:2] + "\\n" }}{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN_3_STYLE = """{%- if tools %}
    {{- raise_exception('no tools here') }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not ns.found %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
        {%- set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and loop.index0 < ns.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL_STYLE = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% endif %}{% endfor %}"""

ODDITIES = """{% for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
  {{ {'b': message.content, 'a': '<&>é'} | tojson }} {{ [1, {'x': none}] | tojson(indent=2) }}
{% endfor %}
  {%- set d = dict(a=1) %}{{ d.a }}{{ message is defined }}{{ pad_token is defined }}"""

CONVERSATION = [
    {"role": "user", "content": ' Hi, <there> & "you" ☃ '},
    {"role": "assistant", "content": "<think>hm</think>\n\nHello\n"},
    {"role": "user", "content": "Again\n\nplease"},
]
WITH_SYSTEM = [{"role": "system", "content": " Be brief. "}, *CONVERSATION]


def transformers_tokenizer(template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), bos_token=BOS, eos_token=EOS, chat_template=template
    )


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "variables"),
    [
        (CHATML, WITH_SYSTEM, {}),
        (LLAMA_3_STYLE, WITH_SYSTEM, {}),
        (LLAMA_3_STYLE, CONVERSATION, {}),
        (QWEN_3_STYLE, WITH_SYSTEM, {}),
        (QWEN_3_STYLE, CONVERSATION, {"enable_thinking": False}),
        (MISTRAL_STYLE, CONVERSATION, {}),
        (ODDITIES, WITH_SYSTEM, {}),
    ],
)
def test_same_text_and_ids_as_transformers(
    template: str, messages: list[dict[str, str]], variables: dict[str, Any], add_generation_prompt: bool
) -> None:
    theirs = transformers_tokenizer(template)
    text = ChatTemplate(template, {"bos_token": BOS, "eos_token": EOS}).render(
        messages, add_generation_prompt=add_generation_prompt, variables=variables
    )
    options = {"add_generation_prompt": add_generation_prompt, **variables}
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    ids = HuggingFaceEncoder(byte_tokenizer_json()).encode(text, add_special_tokens=False)
    assert ids == theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def test_no_second_beginning_token() -> None:
    text = ChatTemplate(LLAMA_3_STYLE, {"bos_token": BOS}).render(CONVERSATION)
    ids = HuggingFaceEncoder(byte_tokenizer_json()).encode(text, add_special_tokens=False)
    bos = byte_tokenizer().token_to_id(BOS)
    assert bos is not None
    assert ids.count(bos) == 1


def test_a_template_refusal_has_its_message() -> None:
    with pytest.raises(InvalidParameter, match="roles must alternate") as caught:
        ChatTemplate(MISTRAL_STYLE, {"bos_token": BOS, "eos_token": EOS}).render(WITH_SYSTEM)
    assert caught.value.param == "messages"


def test_deeply_nested_data_is_a_client_error() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidParameter, match="RecursionError"):
        ChatTemplate("{{ messages | tojson }}", {}).render([{"content": nested}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_the_sandbox_holds(attack: str) -> None:
    with pytest.raises(InvalidParameter):
        ChatTemplate(attack, {}).render([dict(message) for message in CONVERSATION])


def test_callers_cannot_replace_what_the_gateway_sets() -> None:
    template = ChatTemplate("{{ messages|length }}{{ mine }}", {"bos_token": BOS})
    assert template.render(CONVERSATION, variables={"mine": "!"}) == "3!"
    for name in ("messages", "add_generation_prompt", "bos_token"):
        with pytest.raises(InvalidParameter) as caught:
            template.render(CONVERSATION, variables={name: "x"})
        assert caught.value.param == f"chat_template_kwargs.{name}"


def test_rendered_text_is_bounded() -> None:
    """A template may write all tools for each message, or loop over all messages without output."""
    long = ChatTemplate("{% for m in messages %}{{ messages[0].content }}{% endfor %}", {}, max_chars=1000)
    assert len(long.render([{"content": "x" * 100}] * 10)) == 1000
    with pytest.raises(InvalidParameter, match="exceeds 1000 characters"):
        long.render([{"content": "x" * 100}] * 11)
    slow = ChatTemplate("{% for m in messages %}{{ (messages | tojson)[:0] }}{% endfor %}", {}, cpu_limit_s=0.0)
    assert slow.render([{"content": "x"}]) == ""
    with pytest.raises(InvalidParameter, match="takes longer"):
        slow.render([{"content": "x"}] * 16)


class _FromABusyMachine(dict[str, Any]):
    """A message that takes wall time but no CPU time."""

    def __getitem__(self, name: str) -> Any:
        time.sleep(0.005)
        return super().__getitem__(name)


def test_a_busy_machine_causes_no_refusals() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}", {}, cpu_limit_s=0.05)
    assert template.render([_FromABusyMachine(content="x")] * 20) == "x" * 20
