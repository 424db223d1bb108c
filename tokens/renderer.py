"""Chat templates that are not proven to end soon (``template_proof``), each rendered in a process of its own.

    gateway                                          renderer
    ModelTokens ── conversation, length first ─────> stdin ──> the template, under limits of time and memory
                <─ text, or why there is none ────── stdout
                                                     SIGPROF, RLIMIT_AS ──> it ends; the next one starts another

One such process for each template: what one costs, others' do not pay for. It has no torch, and of the gateway only the
template's own code. This module is both sides: the gateway's, and with ``python -m`` the process.
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

from tokens.chat_template import Arguments, BeyondLimits, ChatTemplate
from web.errors import InvalidParameter, Overloaded

RENDER_CPU_S: Final = 2.0  # of one conversation
COMPILE_CPU_S: Final = 2.0
ANSWER_LIMIT_S: Final = 20.0  # then the machine is too busy, which says nothing of the template
END_LIMIT_S: Final = 5.0  # of a killed process; past it, the machine hangs
MEMORY_BYTES: Final = 1024**3
MAX_WAITING: Final = 64  # conversations for one template
_LENGTH: Final = struct.Struct(">I")


class RendererDied(Exception):
    """The process has used up its time or memory."""


class Source(Struct):
    """What the process is told first."""

    source: str
    special_tokens: dict[str, str]


class Conversation(Struct):
    """What is to be rendered."""

    messages: list[Any]
    add_generation_prompt: bool
    tools: list[Any]
    variables: dict[str, Any] | None


class Rendered(Struct):
    """What became of it."""

    text: str = ""
    refusal: str | None = None  # the template's, in words for the caller
    param: str | None = None
    is_beyond_limits: bool = False
    variables: list[str] = []  # that the template reads; told of the source


class Renderer:
    """The gateway's side. Only the event loop touches it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.variables: frozenset[str] = frozenset()  # that it reads; known once it has started
        self._special_tokens = dict(special_tokens)
        self._process: asyncio.subprocess.Process | None = None
        self._killed: asyncio.subprocess.Process | None = None  # the last one
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def start(self) -> None:
        """Compile the template. Raises RendererDied, Overloaded, and InvalidParameter in words for the operator."""
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
        """See ChatTemplate. Raises Overloaded too, and InvalidParameter where time or memory does not suffice."""
        if self._waiting >= MAX_WAITING:
            raise Overloaded("Too many conversations wait for this model's chat template at the moment.")
        asked = Conversation(list(messages), add_generation_prompt, list(tools), dict(variables) if variables else None)
        self._waiting += 1
        try:
            told = await self._told(asked)
        except RendererDied as error:
            message = f"The model's chat template cannot render this: {error}"
            raise InvalidParameter(message, param="messages") from error
        finally:
            self._waiting -= 1
        if told.refusal is not None:
            raise InvalidParameter(told.refusal, param=told.param)
        return told.text

    async def probe(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Render a conversation, or have it refused.

        Raises RendererDied where the limits do not suffice for that, and Overloaded.
        """
        told = await self._told(Conversation(list(messages), add_generation_prompt=True, tools=[], variables=None))
        if told.is_beyond_limits:
            raise RendererDied(told.refusal)

    async def _told(self, asked: Conversation) -> Rendered:
        async with self._turn:
            process = self._process
            if process is None or process.returncode is not None:
                process = await self._started()
            return await self._ask(process, asked)

    async def _started(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "tokens.renderer",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # it finds what we find, and nothing else
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._process = process
        told = await self._ask(process, Source(self.source, self._special_tokens))
        if told.refusal is not None:
            self.kill()
            raise InvalidParameter(told.refusal, param="model")
        self.variables = frozenset(told.variables)
        return process

    async def _ask(self, process: asyncio.subprocess.Process, asked: Source | Conversation) -> Rendered:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                told = msgspec.msgpack.decode(await _answer_of(process, _framed(asked)), type=Rendered)
        except TimeoutError as error:  # its own limits are of the processor's time, and have not been reached
            self.kill()
            raise Overloaded(f"A chat template got no answer within {ANSWER_LIMIT_S:g} s.") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.kill()
            raise RendererDied("it takes more time or memory than it may have") from error
        except BaseException:  # nobody takes the answer, which the next one would get
            self.kill()
            raise
        return told

    def kill(self) -> None:
        """End the process; the next conversation starts another."""
        process, self._process = self._process, None
        if process is not None:
            self._killed = process
            process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001  # kills it, and closes its pipes

    async def close(self) -> None:
        """End the process for good, and return when it has ended."""
        self.kill()
        if self._killed is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_LIMIT_S):
                    await self._killed.wait()


async def _answer_of(process: asyncio.subprocess.Process, frame: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:  # never: they are pipes
        return b""
    process.stdin.write(frame)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return await process.stdout.readexactly(length)


def _framed(message: Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Render conversations until there are no more."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends us
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source = msgspec.msgpack.decode(_read(asked), type=Source)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)  # SIGPROF ends a process that does not handle it
    try:
        template = ChatTemplate(source.source, source.special_tokens)
    except Exception as error:  # noqa: BLE001  # whatever it is, the template is at fault, and the gateway says so
        _answer(answers, Rendered(refusal=f"{type(error).__name__}: {error}"))
        return
    _answer(answers, Rendered(variables=sorted(template.variables)))
    while data := _read(asked):
        signal.setitimer(signal.ITIMER_PROF, RENDER_CPU_S)
        _answer(answers, _rendered(template, msgspec.msgpack.decode(data, type=Conversation)))


def _rendered(template: ChatTemplate, asked: Conversation) -> Rendered:
    try:
        return Rendered(
            template.render(
                [_with_arguments(message) for message in asked.messages],
                add_generation_prompt=asked.add_generation_prompt,
                tools=asked.tools,
                variables=asked.variables,
            )
        )
    except InvalidParameter as error:
        is_beyond_limits = isinstance(error, BeyondLimits)
        return Rendered(refusal=error.message, param=error.param, is_beyond_limits=is_beyond_limits)


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message as it was before it travelled: arguments of calls are more than a dict."""
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
