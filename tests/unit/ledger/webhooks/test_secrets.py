"""Signatures, as others verify them, and secrets at rest."""

import json
import re
import time
from pathlib import Path

import openai
import pytest
from openai.types.webhooks import ResponseCompletedWebhookEvent
from pydantic import SecretStr
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from ledger.webhooks.events import event_id, new_event
from ledger.webhooks.secrets import PREFIX, SecretBox, SecretError, new_secret, signatures

EVENT = new_event("team_a", "response.completed", event_id("a"), {"id": "resp_1 ü"}, created_unix_s=1_800_000_000)


def headers_of(secrets: list[str], unix_s: int | None = None) -> dict[str, str]:
    unix_s = int(time.time()) if unix_s is None else unix_s
    signature = signatures(secrets, EVENT.id, unix_s, EVENT.body)
    return {"webhook-id": EVENT.id, "webhook-timestamp": str(unix_s), "webhook-signature": signature}


def test_the_schemes_own_example() -> None:
    """From the Standard Webhooks specification's reference implementations."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    found = signatures([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_openais_sdk_and_the_schemes_library_accept_what_we_sign() -> None:
    secret, other = new_secret(), new_secret()
    assert secret.startswith(PREFIX)
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    for headers in (headers_of([secret]), headers_of([other, secret])):  # the second while a rotation lasts
        event = client.webhooks.unwrap(EVENT.body, headers)
        assert isinstance(event, ResponseCompletedWebhookEvent)
        assert (event.id, event.data.id, event.object) == (EVENT.id, "resp_1 ü", "event")
        assert Webhook(secret).verify(EVENT.body, headers) == json.loads(EVENT.body)


def test_they_refuse_others() -> None:
    secret = new_secret()
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    for headers in (headers_of([new_secret()]), headers_of([secret], int(time.time()) - 3600)):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(EVENT.body, headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(EVENT.body, headers)


def test_the_examples_in_the_docs_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[4] / "docs" / "how-to" / "webhooks.md").read_text()
    secret = new_secret()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for example in examples:
        exec(example, {"secret": secret, "body": EVENT.body, "headers": headers_of([secret])})
        with pytest.raises((openai.InvalidWebhookSignatureError, WebhookVerificationError)):
            exec(example, {"secret": secret, "body": EVENT.body + b" ", "headers": headers_of([secret])})
    assert capsys.readouterr().out == "response.completed resp_1 ü\n" * len(examples)
    assert len(examples) == 2


def test_a_sealed_secret_opens_for_its_endpoint_and_pepper_alone() -> None:
    box, secret = SecretBox(SecretStr("pepper")), new_secret()
    sealed = box.seal(secret, "wh_a")
    assert secret.removeprefix(PREFIX) not in sealed
    assert sealed != box.seal(secret, "wh_a")
    assert box.open(sealed, "wh_a") == secret
    for other, endpoint in ((box, "wh_b"), (SecretBox(SecretStr("other")), "wh_a")):
        with pytest.raises(SecretError, match=endpoint):
            other.open(sealed, endpoint)
