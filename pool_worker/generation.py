"""Translates a job of the queue into an engine request."""

from collections.abc import Callable, Collection
from functools import partial
from itertools import accumulate, pairwise
from typing import cast, get_args

from msgspec.structs import replace

from engine.pooling.pooling_types import PoolingInput, PoolingRequest, PoolingTask
from engine.types import GenerationRequest, GrammarKind, ResumePoint
from pool_worker.engines.base import Engine
from pool_worker.engines.chat import ChatPoint, ChatRequest
from protocol.dialects.dialect import AnswerForm, ContentFinder
from protocol.errors import ProtocolError
from protocol.generation import SAMPLING_DEFAULTS, Pooling, SamplingParams, sampling_defaults
from protocol.job import TAKES_MESSAGES, Job, Markup, Sampling, decode_chat, unpack_token_ids


def prompt_tokens_of(job: Job) -> int:
    """Return the prompt's length: counted if the job holds the token ids, else as the gateway states it."""
    return len(job.prompt_ids) // 4 or job.prompt_tokens


def billed_prompt_tokens_of(job: Job) -> int:
    """Return what a hosted API reads: for each choice, the prompt and the output so far."""
    if job.pooling is not None:
        return prompt_tokens_of(job)
    ended = sum(point.finish_reason is not None for point in job.resume)
    begun = sum(point.used_tokens for point in job.resume if point.finish_reason is None)
    return prompt_tokens_of(job) * (job.answers - ended) + begun


def engine_request(
    request_id: str,
    job: Job,
    prompt_ids: list[int],
    adapters: Collection[str] = (),
    honoured: Collection[str] = SAMPLING_DEFAULTS,
) -> GenerationRequest | PoolingRequest:
    """Translate a job; ``honoured``: see ``sampling_params``. Raises ProtocolError if the job is inconsistent."""
    if job.pooling is None:
        return generation_request(request_id, job, prompt_ids, adapters, honoured)
    return pooling_request(request_id, job, job.pooling, prompt_ids)


def pooling_request(request_id: str, job: Job, pooling: Pooling, prompt_ids: list[int]) -> PoolingRequest:
    """Translate a job of several inputs, except those already answered. Raises ProtocolError."""
    lengths = unpack_token_ids(pooling.lengths)
    firsts = unpack_token_ids(pooling.first_lengths) or lengths
    if sum(lengths) != len(prompt_ids) or len(firsts) != len(lengths):
        raise ProtocolError(f"inputs of {sum(lengths)} tokens in a prompt of {len(prompt_ids)}")
    if pooling.task not in get_args(PoolingTask):
        raise ProtocolError(f"unknown task {pooling.task!r}")
    answered = {point.index for point in job.resume}
    spans = enumerate(pairwise(accumulate(lengths, initial=0)))
    inputs = [
        PoolingInput(index, prompt_ids[begin:end], firsts[index])
        for index, (begin, end) in spans
        if index not in answered
    ]
    return PoolingRequest(request_id, cast("PoolingTask", pooling.task), inputs, pooling.dimensions)


def chat_request(
    request_id: str, job: Job, packed_chat: bytes, honoured: Collection[str] = SAMPLING_DEFAULTS
) -> ChatRequest:
    """Translate a job for an engine that takes messages. Raises ProtocolError."""
    resume = tuple(
        ChatPoint(point.index, point.text or "", point.used_tokens, is_complete=point.finish_reason is not None)
        for point in job.resume
    )
    chat, sampling = decode_chat(packed_chat), sampling_params(job.sampling, honoured)
    return ChatRequest(request_id, chat, sampling, job.prompt_tokens, resume, job.cache_salt)


def can_go_on(job: Job, engine: Engine) -> bool:
    """Report whether an engine can take a job and resume its answers."""
    begun = [point for point in job.resume if point.finish_reason is None]
    if begun and not engine.continues:
        return False
    if engine.takes != TAKES_MESSAGES:
        return True
    has_chat = job.chat is not None or job.chat_object is not None
    return has_chat and all(point.text is not None for point in begun)


def generation_request(
    request_id: str,
    job: Job,
    prompt_ids: list[int],
    adapters: Collection[str] = (),
    honoured: Collection[str] = SAMPLING_DEFAULTS,
) -> GenerationRequest:
    """Translate a job whose model is the engine's own or one of its ``adapters``.

    Complete choices are included: the engine ends them again at once, and the other choices keep their indexes, which
    determine their seeds. Raises ProtocolError if a resume point's tokens are not whole 32-bit integers.
    """
    resume = tuple(ResumePoint(p.index, tuple(unpack_token_ids(p.token_ids)), p.text_chars) for p in job.resume)
    adapter = job.model if job.model in adapters else None
    return GenerationRequest(
        request_id,
        prompt_ids,
        sampling_params(job.sampling, honoured),
        resume,
        job.scored_tokens,
        adapter=adapter,
        cache_salt=job.cache_salt,
        content_finder=content_finder(job.sampling.markup),
    )


def content_finder(markup: Markup | None) -> Callable[[], ContentFinder] | None:
    """Return a factory of the ``content_finder`` of a choice; None if the whole answer is content."""
    return None if markup is None else partial(ContentFinder, AnswerForm.of_markup(markup))


def sampling_params(sampling: Sampling, honoured: Collection[str] = SAMPLING_DEFAULTS) -> SamplingParams:
    """Return a job's sampling parameters, with the model's own defaults of those that are ``honoured``.

    Raises ProtocolError for an unknown kind of grammar.
    """
    if sampling.grammar is not None and sampling.grammar.kind not in get_args(GrammarKind):
        raise ProtocolError(f"unknown kind of grammar {sampling.grammar.kind!r}")
    usable = sampling_defaults(sampling.defaults)
    return replace(sampling, **{name: value for name, value in usable.items() if name in honoured})
