"""Chat templates that are not proven to terminate quickly (``template_proof``), each rendered in a separate process.

    gateway                                          renderer
    ModelTokens ── conversation, length first ─────> stdin ──> the template, under limits of time and memory
                <─ text, or why there is none ────── stdout
                                                     SIGPROF, RLIMIT_AS ──> it ends; the next one starts another

Each template has its own process, so that an expensive one does not slow down others. The process imports no torch, and
of the gateway only the template code. This module has both sides: the gateway's and, with ``python -m``, the process.
"""

import asyncio
import contextlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Struct

from gateway.errors import InvalidParameter, Overloaded
from gateway.tokenizing.templates import BeyondLimits, ChatTemplate
from gateway.tokenizing.turns import AS_IS, Arguments, TemplateRules
from protocol.process import plain_environment, write_to

RENDER_CPU_S: Final = 2.0  # CPU time for one conversation
COMPILE_CPU_S: Final = 2.0
ANSWER_LIMIT_S: Final = 60.0  # enough at a thirtieth of a CPU; beyond it the machine is too busy
END_LIMIT_S: Final = 5.0  # of a killed process; beyond it, the machine hangs
MEMORY_BYTES: Final = 1024**3
MAX_WAITING: Final = 64  # conversations for one template
_LENGTH: Final = struct.Struct(">I")


class RendererDied(Exception):
    """The process has exhausted its time or memory."""


class Source(Struct):
    """The first message to the process: the template."""

    source: str
    special_tokens: dict[str, str]


class Conversation(Struct):
    """A conversation to render."""

    messages: list[Any]
    add_generation_prompt: bool
    tools: list[Any]
    variables: dict[str, Any] | None


class Rendered(Struct):
    """The result for a Source or a Conversation."""

    text: str = ""
    refusal: str | None = None  # the template's message, for the client
    param: str | None = None
    is_beyond_limits: bool = False
    variables: list[str] = []  # variables that the template reads; in the answer to the source


_decode_source: Final = msgspec.msgpack.Decoder(Source).decode
_decode_conversation: Final = msgspec.msgpack.Decoder(Conversation).decode
_decode_rendered: Final = msgspec.msgpack.Decoder(Rendered).decode


class Renderer:
    """The gateway's side. Use it from the event loop only."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, answer_limit_s: float = ANSWER_LIMIT_S
    ) -> None:
        self.source = source
        self.rules: TemplateRules = AS_IS  # what the template accepts, set when known
        self._answer_limit_s = answer_limit_s
        self.variables: frozenset[str] = frozenset()  # variables that it reads; known after the start
        self._special_tokens = dict(special_tokens)
        self._process: asyncio.subprocess.Process | None = None
        self._killed: asyncio.subprocess.Process | None = None  # the last killed process
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def start(self) -> None:
        """Compile the template. Raises RendererDied, Overloaded, and InvalidParameter (for the operator)."""
        async with self._turn:
            await self._started()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation. Raises Overloaded, and InvalidParameter if refused or beyond time or memory."""
        if self._waiting >= MAX_WAITING:
            raise Overloaded("Too many conversations are waiting for this model's chat template. Try again later.")
        request = Conversation(
            list(messages), add_generation_prompt, list(tools), dict(variables) if variables else None
        )
        self._waiting += 1
        try:
            result = await self._send(request)
        except RendererDied as error:
            message = f"The model's chat template cannot render this conversation: {error}"
            raise BeyondLimits(message, param="messages") from error
        finally:
            self._waiting -= 1
        if result.refusal is not None:
            kind = BeyondLimits if result.is_beyond_limits else InvalidParameter
            raise kind(result.refusal, param=result.param)
        return result.text

    async def probe(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Render a conversation; a refusal by the template is fine.

        Raises RendererDied if the limits are too low for it, and Overloaded.
        """
        result = await self._send(Conversation(list(messages), add_generation_prompt=True, tools=[], variables=None))
        if result.is_beyond_limits:
            raise RendererDied(result.refusal)

    async def _send(self, request: Conversation) -> Rendered:
        async with self._turn:
            process = self._process
            if process is None or process.returncode is not None:
                process = await self._started()
            return await self._ask(process, request)

    async def _started(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "gateway.tokenizing.renderer",
            env=plain_environment(),  # a template from a worker must not find secrets there
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._process = process
        result = await self._ask(process, Source(self.source, self._special_tokens))
        if result.refusal is not None:
            self.kill()
            raise InvalidParameter(result.refusal, param="model")
        self.variables = frozenset(result.variables)
        return process

    async def _ask(self, process: asyncio.subprocess.Process, request: Source | Conversation) -> Rendered:
        try:
            async with asyncio.timeout(self._answer_limit_s):
                result = _decode_rendered(await _answer_of(process, _framed(request)))
        except TimeoutError as error:  # its own limits are of CPU time, and were not reached
            self.kill()
            raise Overloaded(f"The chat template was not rendered within {self._answer_limit_s:g} s.") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.kill()
            raise RendererDied("it exceeds the time or memory limit") from error
        except BaseException:  # the unread answer would go to the next conversation
            self.kill()
            raise
        return result

    def kill(self) -> None:
        """Kill the process; the next conversation starts another."""
        process, self._process = self._process, None
        if process is not None:
            self._killed = process
            process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001  # kills it, and closes its pipes

    async def close(self) -> None:
        """Kill the process permanently, and wait until it has exited."""
        self.kill()
        if self._killed is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_LIMIT_S):
                    await self._killed.wait()


async def _answer_of(process: asyncio.subprocess.Process, frame: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:  # impossible: they are pipes
        return b""
    await write_to(process.stdin, frame)
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return await process.stdout.readexactly(length)


def _framed(message: Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Render conversations until the input ends."""
    request, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway stops this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source = _decode_source(_read(request))
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)  # an unhandled SIGPROF terminates the process
    try:
        template = ChatTemplate(source.source, source.special_tokens)
    except Exception as error:  # noqa: BLE001  # any fault is the template's, and reported by the gateway
        _answer(answers, Rendered(refusal=f"{type(error).__name__}: {error}"))
        return
    _answer(answers, Rendered(variables=sorted(template.variables)))
    while data := _read(request):
        signal.setitimer(signal.ITIMER_PROF, RENDER_CPU_S)
        _answer(answers, _rendered(template, _decode_conversation(data)))


def _rendered(template: ChatTemplate, request: Conversation) -> Rendered:
    try:
        return Rendered(
            template.render(
                [_with_arguments(message) for message in request.messages],
                add_generation_prompt=request.add_generation_prompt,
                tools=request.tools,
                variables=request.variables,
            )
        )
    except InvalidParameter as error:
        is_beyond_limits = isinstance(error, BeyondLimits)
        return Rendered(refusal=error.message, param=error.param, is_beyond_limits=is_beyond_limits)


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Restore ``Arguments`` objects, which are sent as plain dicts, in a message's calls."""
    for call in message.get("tool_calls", ()):
        if isinstance(call["function"]["arguments"], dict):
            call["function"]["arguments"] = Arguments(call["function"]["arguments"])
    return message


def _read(stream: BinaryIO) -> bytes:
    header = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(header)[0]) if len(header) == _LENGTH.size else b""


def _answer(stream: BinaryIO, rendered: Rendered) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    stream.write(_framed(rendered))
    stream.flush()


if __name__ == "__main__":
    main()
