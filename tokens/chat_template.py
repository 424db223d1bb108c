"""Chat templates, rendered exactly as transformers does (``PreTrainedTokenizer.apply_chat_template``).

Templates come from model folders, which may come from anywhere: the sandbox keeps them from touching anything but
their input, which is plain JSON data.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from web.errors import InvalidParameter

RENDER_CPU_LIMIT_S: Final = 10.0  # of the thread: a busy machine refuses nothing
PIECES_AT_A_TIME: Final = 8  # between two looks at the clock, and before the first: it costs a call of the system
MAX_RENDERED_CHARS: Final = 32 * 1024 * 1024  # several times what the largest body holds


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only text."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # Jinja only looks names up in it

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the body as it is."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(  # Jinja's own escapes HTML
    value: object,
    ensure_ascii: bool = False,  # templates pass it by position too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


# What a conversation is counted by that an API renders in a way of its own: about as many tokens, none of them sent.
COUNTING_SOURCE: Final = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}
{{ message.name or '' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}

{% endfor %}
{%- if add_generation_prompt %}assistant
{% endif %}"""


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, and where a template joins them to a text, as DeepSeek's do, its JSON."""

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


def _counted(pieces: Iterator[str]) -> str:
    """What a template writes, as long as it is not too much: it may write anything for each message, and nothing long.

    The proof of a template (``template_proof``) rests upon these limits.
    """
    written: list[str] = []
    chars, deadline_s = 0, None
    for piece in pieces:
        written.append(piece)
        chars += len(piece)
        if chars > MAX_RENDERED_CHARS:
            raise jinja2.TemplateError(f"it would have more than {MAX_RENDERED_CHARS} characters")
        if not len(written) % PIECES_AT_A_TIME:
            now_s = time.thread_time()
            if deadline_s is None:
                deadline_s = now_s + RENDER_CPU_LIMIT_S
            elif now_s > deadline_s:
                raise jinja2.TemplateError(f"it takes longer than {RENDER_CPU_LIMIT_S:g} s")
    return "".join(written)


def parsed(source: str) -> nodes.Template:
    """The syntax tree of a template, nothing of which has run. Raises jinja2.TemplateSyntaxError and RecursionError."""
    return _environment().parse(source)


class BeyondLimits(InvalidParameter):
    """A template needs more memory or depth for a conversation than there is."""


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile ``source``. Raises jinja2.TemplateSyntaxError."""
        environment = _environment()
        self.source = source
        self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))  # that it reads
        self._template = environment.from_string(source)
        # They are copied for each conversation, and Jinja's own chain of mappings takes five times as long to copy.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation; ``variables`` are the caller's own (``chat_template_kwargs``).

        Raises InvalidParameter, with the template's own words where that refuses the conversation.
        """
        fixed = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        for name in variables or ():
            if name in fixed:
                raise InvalidParameter(f"'{name}' cannot be set here.", param=f"chat_template_kwargs.{name}")
        try:
            return _counted(self._template.generate(fixed, **(variables or {})))
        except jinja2.TemplateError as error:
            raise InvalidParameter(f"The model's chat template refuses this: {error}", param="messages") from error
        except (RecursionError, MemoryError) as error:
            message = f"The model's chat template cannot render this: {type(error).__name__}: {error}"
            raise BeyondLimits(message, param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            # A template is a program; what it does with data it did not expect is the data's fault, not ours.
            message = f"The model's chat template cannot render this: {type(error).__name__}: {error}"
            raise InvalidParameter(message, param="messages") from error


def up_to_content(text: str, content: str) -> str:
    """A rendered conversation up to the end of its last message's content, so that an answer goes on with that.

    As transformers does it: a template may have trimmed the content. Raises InvalidParameter.
    """
    start = text.rfind(content.strip())
    if start < 0 or not content.strip():
        message = "The last message has no text that this model's chat template lets be continued."
        raise InvalidParameter(message, param="continue_final_message")
    kept = content.lstrip() if text.startswith(content.lstrip(), start) else content.strip()
    return text[: start + len(kept)]
