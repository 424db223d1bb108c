"""Chat templates, rendered exactly as by transformers (``PreTrainedTokenizer.apply_chat_template``).

Templates come from model folders of any origin: the sandbox gives them access to nothing but their input, which is
plain JSON data.
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

from gateway.errors import InvalidParameter
from gateway.tokenizing.turns import AS_IS, TemplateRules

RENDER_CPU_LIMIT_S: Final = 10.0  # CPU time of the thread: a busy machine causes no refusals
PIECES_AT_A_TIME: Final = 8  # between two reads of the clock (a system call), and before the first
MAX_RENDERED_CHARS: Final = 32 * 1024 * 1024  # several times the largest body


class _GenerationBlocks(Extension):
    """Support for ``{% generation %}``, which marks the assistant's text for training; here it has no effect."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # Jinja only looks names up in it

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the body unchanged."""
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


# Template for counting conversations that a hosted API renders itself: about as many tokens, none of which are sent.
COUNTING_SOURCE: Final = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}
{{ message.name or '' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}

{% endfor %}
{%- if add_generation_prompt %}assistant
{% endif %}"""


def _join_within_limits(pieces: Iterator[str], max_chars: int, cpu_limit_s: float) -> str:
    """Join the pieces that a template writes, within limits of size and CPU time.

    The proof of a template (``template_proof``) relies on these limits.
    """
    written: list[str] = []
    chars, deadline_s = 0, None
    for piece in pieces:
        written.append(piece)
        chars += len(piece)
        if chars > max_chars:
            raise jinja2.TemplateError(f"the rendered text exceeds {max_chars} characters")
        if not len(written) % PIECES_AT_A_TIME:
            now_s = time.thread_time()
            if deadline_s is None:
                deadline_s = now_s + cpu_limit_s
            elif now_s > deadline_s:
                raise jinja2.TemplateError(f"rendering takes longer than {cpu_limit_s:g} s")
    return "".join(written)


def parsed(source: str) -> nodes.Template:
    """Return a template's syntax tree without running it. Raises jinja2.TemplateSyntaxError and RecursionError."""
    return _environment().parse(source)


class BeyondLimits(InvalidParameter):
    """A template exceeds the available memory or recursion depth for a conversation."""


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_chars: int = MAX_RENDERED_CHARS,
        cpu_limit_s: float = RENDER_CPU_LIMIT_S,
    ) -> None:
        """Compile ``source``. Raises jinja2.TemplateSyntaxError."""
        self._max_chars = max_chars
        self._cpu_limit_s = cpu_limit_s
        environment = _environment()
        self.source = source
        self.rules: TemplateRules = AS_IS  # what the template accepts, set when known
        self.variables = frozenset(
            meta.find_undeclared_variables(environment.parse(source))
        )  # variables that the template reads
        self._template = environment.from_string(source)
        # Copied for each conversation; Jinja's own chain of mappings takes five times as long to copy.
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
        """Render a conversation; ``variables`` are the client's own (``chat_template_kwargs``).

        Raises InvalidParameter, with the template's own message if the template refuses the conversation.
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
            pieces = self._template.generate(fixed, **(variables or {}))
            return _join_within_limits(pieces, self._max_chars, self._cpu_limit_s)
        except jinja2.TemplateError as error:
            raise InvalidParameter(
                f"The model's chat template rejects this conversation: {error}", param="messages"
            ) from error
        except (RecursionError, MemoryError) as error:
            message = f"The model's chat template cannot render this conversation: {type(error).__name__}: {error}"
            raise BeyondLimits(message, param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            # A template is a program: if it fails on unexpected data, the request is at fault.
            message = f"The model's chat template cannot render this conversation: {type(error).__name__}: {error}"
            raise InvalidParameter(message, param="messages") from error


def up_to_content(text: str, content: str) -> str:
    """Cut a rendered conversation after its last message's content, so that the answer continues that message.

    Follows transformers: a template may have trimmed the content. Raises InvalidParameter.
    """
    start = text.rfind(content.strip())
    if start < 0 or not content.strip():
        message = "The last message cannot be continued with this model's chat template."
        raise InvalidParameter(message, param="continue_final_message")
    kept = content.lstrip() if text.startswith(content.lstrip(), start) else content.strip()
    return text[: start + len(kept)]
