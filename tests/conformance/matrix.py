"""The tables of docs/reference/engines.md: what each kind of server supports, as the wire formats declare it.

    python -m tests.conformance.matrix

``test_engine_features.py`` checks each cell against a server: declared fields are sent and answered, and all others are
refused by name. A house test compares the table in the docs with this one.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pool_worker.engines.chat_formats.openai_profiles import PROFILES, Profile
from pool_worker.engines.formats import FORMATS
from pool_worker.engines.formats.base import Abilities, Medium, done_here
from pool_worker.engines.vllm_inprocess import VllmInProcess
from protocol.generation import Grammar

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "engines.md"
BEGIN: Final = "<!-- matrix: python -m tests.conformance.matrix -->\n"
END: Final = "<!-- end of the matrix -->\n"
PROFILES_BEGIN: Final = "<!-- profiles: python -m tests.conformance.matrix -->\n"
PROFILES_END: Final = "<!-- end of the profiles -->\n"

# Fields of SamplingParams that not every server supports, each with a value other than its default.
FIELDS: Final[dict[str, Any]] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {60: 2.0},
    "seed": 7,
    "logprobs": 2,
    "stop_token_ids": (30,),
    "skip_special_tokens": False,
    "min_tokens": 2,
    "ignore_eos": True,
    "allowed_token_ids": (60, 61),
    "bad_words": ("never",),
    "prompt_logprobs": 1,
}
GRAMMARS: Final[dict[str, Grammar]] = {
    "json_schema": Grammar("json_schema", '{"type": "object"}'),
    "json_object": Grammar("json_object", ""),
    "regex": Grammar("regex", "[a-z]+"),
    "lark": Grammar("lark", 'start: "a"'),
}
CHECKED: Final = {
    "vllm": "vLLM 0.32 for CPUs",
    "vllm_inprocess": "vLLM 0.32 for CPUs",
    "llamacpp": "llama.cpp, as in `xllamacpp` 2026.10",
    "triton": "Triton 2.51, as in `nvidia-pytriton` 0.7",
    "openai_completions": "llama.cpp",
}
# Answer formats that each profile of "openai_chat" supports.
SOURCES: Final = {
    "openai": "https://platform.openai.com/docs/api-reference/chat",
    "azure": "https://learn.microsoft.com/en-us/azure/ai-services/openai/reference",
    "openrouter": "https://openrouter.ai/docs/api-reference/chat-completion",
    "together": "https://docs.together.ai/reference/chat-completions-1",
    "groq": "https://console.groq.com/docs/api-reference",
    "deepseek": "https://api-docs.deepseek.com/guides/chat_prefix_completion",
    "mistral": "https://docs.mistral.ai/api/",
    "gemini": "https://ai.google.dev/gemini-api/docs/openai",
    "ray": "https://docs.ray.io/en/latest/serve/llm/index.html",
    "openllm": "https://github.com/bentoml/OpenLLM",
    "tgi": "https://huggingface.co/docs/text-generation-inference/messages_api",
    "vllm": "https://docs.vllm.ai/en/latest/serving/openai_compatible_server/",
    "sglang": "https://docs.sglang.ai/basic_usage/openai_api_completions.html",
}
ALL_PROFILES: Final = frozenset({"temperature", "top_p"})  # fields that each of them supports
A_REPLAY: Final = "a replay of its schema"


@dataclass(frozen=True)
class Column:
    """One kind of server, as its wire format declares it."""

    kind: str
    asked_at: str
    asked_in: Medium
    answers_in: Medium
    continues_by: str  # the form in which a partial answer is resumed
    known: frozenset[str]  # supported fields of SamplingParams, by the server or the worker
    grammars: frozenset[str]
    takes_cache_salt: bool

    def says(self, field: str) -> str:
        """Return the cell of a field, or of a kind of grammar."""
        return "yes" if field in self.known | self.grammars else "no"


def columns() -> list[Column]:
    """Return every kind of server that takes token ids or text."""
    asked: list[tuple[str, str, type[Abilities]]]
    asked = [(kind, f"`{wire.generate_path}`", wire) for kind, wire in FORMATS.items()]
    asked.insert(1, ("vllm_inprocess", "`AsyncLLM.generate`", VllmInProcess.abilities))
    return [
        Column(
            kind=kind,
            asked_at=asked_at,
            asked_in=abilities.asked_in,
            answers_in=abilities.answers_in,
            continues_by=abilities.asked_in,
            known=done_here(abilities.answers_in) | abilities.honoured,
            grammars=abilities.grammars,
            takes_cache_salt=abilities.takes_cache_salt,
        )
        for kind, asked_at, abilities in asked
    ]


def table(shown: Sequence[Column]) -> str:
    """Return the table, one column per kind."""
    rows: list[tuple[str, Callable[[Column], str]]] = [
        ("endpoint", lambda column: column.asked_at),
        ("takes", lambda column: column.asked_in),
        ("returns", lambda column: column.answers_in),
        ("resumes by", lambda column: column.continues_by),
        ("separates tenants' caches", lambda column: "yes" if column.takes_cache_salt else "no"),
        ("tested with", lambda column: CHECKED.get(column.kind, A_REPLAY)),
    ]
    rows += [(f"`{name}`", partial(Column.says, field=name)) for name in (*FIELDS, *GRAMMARS)]
    lines = [_line(["", *(f"`{column.kind}`" for column in shown)]), _line(["---"] * (len(shown) + 1))]
    return "".join([*lines, *(_line([label, *map(cell, shown)]) for label, cell in rows)])


def profiles_table() -> str:
    """Return the profiles of "openai_chat", one row each."""
    heads = [
        "`profile`",
        "endpoint",
        f"fields besides {_names(ALL_PROFILES)}",
        "schemas",
        "resumes an answer",
        "separates tenants' caches",
    ]
    lines = [_line(heads), _line(["---"] * len(heads))]
    return "".join([*lines, *(_line(_profile_cells(name, profile)) for name, profile in PROFILES.items())])


def _profile_cells(name: str, profile: Profile) -> list[str]:
    fields = profile.honoured - ALL_PROFILES | ({"reasoning_effort"} if profile.takes_effort else set())
    path = profile.path.partition("?")[0]
    goes_on = "no" if profile.in_last_message is None else "yes"
    apart = "no" if profile.salt_field is None else "yes"
    return [f"[`{name}`]({SOURCES[name]})", f"`{path}`", _names(fields), _names(profile.schemas), goes_on, apart]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def split(text: str, begin: str = BEGIN, end: str = END) -> tuple[str, str, str]:
    """Split a document into the parts before, in and after a table."""
    before, _, rest = text.partition(begin)
    inside, _, after = rest.partition(end)
    return before, inside, after


def main() -> int:
    before, _, after = split(DOCUMENT.read_text())
    text = f"{before}{BEGIN}{table(columns())}{END}{after}"
    before, _, after = split(text, PROFILES_BEGIN, PROFILES_END)
    DOCUMENT.write_text(f"{before}{PROFILES_BEGIN}{profiles_table()}{PROFILES_END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
