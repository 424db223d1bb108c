"""Reads a server's facts: its page of facts, and how its tokenizer encodes a sample text."""

from dataclasses import replace
from urllib.parse import quote

from pool_worker.engines.formats import FORMATS
from pool_worker.engines.formats.base import ServerFacts, facts_again
from pool_worker.engines.formats.tokenizer_sample import TOKENIZER_PAGES
from pool_worker.engines.server_connection import ServerConnection


class FactsReader:
    """The facts of one server."""

    def __init__(self, connection: ServerConnection, kind: str) -> None:
        """``kind``: a key of FORMATS."""
        self._connection = connection
        self._format = FORMATS[kind]
        self._tokenizer_page = TOKENIZER_PAGES.get(kind)

    async def read(self, model: str | None) -> ServerFacts:
        """Return the server's facts about ``model``, or about the first model it serves. Raises FactsUnread."""
        path = with_model(self._format.facts_path, model or "")
        facts = await self._connection.facts(path, lambda answer: facts_again(self._format, answer, model))
        return await self.completed(facts)

    async def completed(self, facts: ServerFacts) -> ServerFacts:
        """Return the facts with the tokenizer's sample added."""
        page = self._tokenizer_page
        if page is None:
            return facts
        sample = page.sample_of(await self._connection.page(page.path, page.body(facts.model)))
        return replace(facts, tokenizer_sample=sample)


def with_model(template: str, model: str) -> str:
    """Return a path with the model's name filled in."""
    return template.replace("{model}", quote(model, safe=""))
