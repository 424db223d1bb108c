"""NVIDIA Triton's generate extension: ``POST /v2/models/M/generate_stream``, text in and text out.

The fields of a request depend on the model, and its metadata lists them: the vLLM backend takes all parameters as JSON
in ``sampling_parameters``; models of the TensorRT-LLM backend, and custom models, have an input for each. Errors in the
stream are events, with status 200.

Documentation: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md;
of the backends: src/utils/request.py of .../vllm_backend, and all_models/inflight_batcher_llm/ensemble/config.pbtxt of
.../tensorrtllm_backend
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pool_worker.engines.formats.base import Delta, Medium, ServerFacts, ServerRequest
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import end_of_tokens

_PENALTIES: Final = frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty"})
_BY_VLLM: Final = _PENALTIES | {"temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens"}
_SEED_NAMES: Final = ("seed", "random_seed")
_FLAGS: Final = ("stream", "exclude_input_in_output", "return_finish_reason")
_ENDS: Final = {"stop": "eos", "length": "length"}


class TritonFormat:
    """Triton's ``/generate_stream`` as a WireFormat."""

    asked_in: Medium = "text"
    answers_in: Medium = "text"
    keeps_blanks = False
    health_path = "/v2/health/ready"
    facts_path = "/v2/models/{model}"
    generate_path = "/v2/models/{model}/generate_stream"
    framing: Framing = "server-sent events to the close"
    honoured = _PENALTIES | {"temperature", "top_p", "top_k", "seed"}  # of the backends; see ``facts``
    grammars: frozenset[str] = frozenset()
    takes_cache_salt = False

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read the model's metadata, which has no length."""
        inputs, outputs = (_names(answer.get(key)) for key in ("inputs", "outputs"))
        if "text_input" not in inputs or "text_output" not in outputs:
            raise MalformedEvent("the model has no text_input and text_output")
        if "sampling_parameters" in inputs:
            honoured = _BY_VLLM
        elif "max_tokens" in inputs:
            honoured = _BY_VLLM & inputs | ({"seed"} if inputs & {*_SEED_NAMES} else set())
        else:
            raise MalformedEvent("the model has neither sampling_parameters nor max_tokens")
        versions = answer.get("versions")
        version = ",".join(map(str, versions)) if isinstance(versions, list) else None
        return ServerFacts(str(answer.get("name") or model), inputs=inputs, honoured=honoured, weights_version=version)

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request."""
        params, inputs = ask.params, ask.facts.inputs
        given: dict[str, Any] = {
            name: getattr(params, name) for name in (ask.facts.honoured or frozenset()) - {"seed", "min_tokens"}
        }
        given |= {"max_tokens": ask.max_tokens, "min_tokens": ask.min_tokens}
        if params.temperature == 0 and "top_k" in given:
            given["top_k"] = 1  # greedy even for models without a temperature of 0
        body: dict[str, Any] = {"text_input": ask.text} | {name: True for name in _FLAGS if name in inputs}
        if "sampling_parameters" in inputs:
            seed = {} if ask.seed is None else {"seed": ask.seed}
            return body | {"sampling_parameters": msgspec.json.encode(given | seed).decode()}
        if ask.seed is not None:
            given |= dict.fromkeys(_SEED_NAMES, ask.seed)
        return body | {name: value for name, value in given.items() if name in inputs}

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """Read one event. Only some backends report why an answer ends; otherwise it ends with the stream."""
        del seen_tokens
        if event.get("closed") is True:
            return Delta(ended_by="eos")
        new_text, reason = event.get("text_output"), event.get("finish_reason")
        if not isinstance(new_text, str):
            raise MalformedEvent("an event without text_output")
        if reason in (None, "", "None"):  # not a set: the value may be unhashable
            return Delta(text=new_text)
        return Delta(text=new_text, ended_by=_ENDS.get(str(reason)) or end_of_tokens(reason))


def _names(tensors: object) -> frozenset[str]:
    named = tensors if isinstance(tensors, list) else []
    return frozenset(str(one.get("name")) for one in named if isinstance(one, dict))
