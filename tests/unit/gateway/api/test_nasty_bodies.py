"""Malformed and unusual bodies are refused with the right error, or answered."""

import pytest

from tests.integration.gateway.scripted_worker import answer_hello
from tests.unit.gateway.api.nasty import NASTY, OF_MODEL
from tests.unit.gateway.api.pooling.inputs import EMBEDDER, SCORER, embed, score_by_second, with_card
from tests.unit.gateway.conftest import Start
from tests.unit.gateway.local_gateway import MODEL

GENERATING = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
)  # fmt: skip
MODELS = {
    **dict.fromkeys(GENERATING, (None, answer_hello)),
    "/v1/embeddings": (EMBEDDER, embed),
    **dict.fromkeys(("/v1/score", "/v1/rerank"), (SCORER, score_by_second)),
}


@pytest.mark.parametrize("path", MODELS)
async def test_nasty_bodies(start_local: Start, path: str) -> None:
    card, script = MODELS[path]
    gateway = await start_local(**({} if card is None else with_card(card)))
    await gateway.add_worker(script=script)
    http = gateway.http()
    of_model = (b'{"model": "%b", %b}' % (MODEL.encode(), fields) for fields in OF_MODEL)
    for content in (*NASTY, *of_model):
        answer = await http.post(path, content=content)
        assert answer.status_code in {200, 400, 404}, (content[:200], answer.text[:200])
