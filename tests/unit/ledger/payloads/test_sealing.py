"""A sealed payload opens with its key only, for its own request and part only."""

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from ledger.payloads.errors import BadPayloadKey, BrokenPayload, PayloadKeyMissing, TooLargeToOpen
from ledger.payloads.sealing import MAX_OPENED_BYTES, NONCE_BYTES, SEALED, SEALED_BEFORE, Kind, Sealer, parse_keys

OLD, NEW = b"o" * 32, b"n" * 32
OF_AN_EARLIER_RELEASE = "v7LxFl9KgnJuWMEruXJ9sm8BwBB1u6ACM36Lf02fCM9Wr7lhA86AXA96"
EARLIER_ENCODING = "zlib+aes-256-gcm:866697d7"


@given(st.binary(max_size=200), st.sampled_from([(), (OLD,), (NEW, OLD)]), st.sampled_from((SEALED, SEALED_BEFORE)))
def test_what_was_sealed_opens(data: bytes, keys: tuple[bytes, ...], kind: Kind) -> None:
    sealer = Sealer(keys, kind)
    assert sealer.open(sealer.seal(data, "r", "request"), sealer.encoding, "r", "request") == data


def test_a_nonce_that_comes_again_tells_nothing_of_two_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under AES-GCM two payloads of one nonce have one key stream, so their ciphertexts show how their texts differ."""
    monkeypatch.setattr("ledger.payloads.sealing.os.urandom", bytes)
    sealer = Sealer([OLD])
    texts = b"a" * 50, b"a" * 49 + b"b"
    one, other = (sealer.seal(text, "r", "request")[NONCE_BYTES:] for text in texts)
    assert len({zlib.compress(text)[:3] for text in texts}) == 1
    assert one[:3] != other[:3]


def test_what_earlier_releases_have_sealed_stays_readable() -> None:
    sealed = base64.b64decode(OF_AN_EARLIER_RELEASE)
    assert Sealer([NEW, OLD]).open(sealed, EARLIER_ENCODING, "r", "answer") == b"secret"


def test_old_keys_open_and_the_newest_seals() -> None:
    before, after = Sealer([OLD]), Sealer([NEW, OLD])
    sealed = before.seal(b"secret", "r", "answer")
    assert after.open(sealed, before.encoding, "r", "answer") == b"secret"
    with pytest.raises(PayloadKeyMissing):
        before.open(after.seal(b"secret", "r", "answer"), after.encoding, "r", "answer")
    assert b"secret" not in sealed
    assert sealed != before.seal(b"secret", "r", "answer")


@pytest.mark.parametrize(
    ("request_id", "part", "flip"), [("other", "request", 0), ("r", "answer", 0), ("r", "request", 1)]
)
def test_what_was_moved_or_changed_does_not_open(request_id: str, part: str, flip: int) -> None:
    sealer = Sealer([OLD])
    sealed = sealer.seal(b"secret", "r", "request")
    changed = sealed[:-1] + bytes([sealed[-1] ^ flip])
    with pytest.raises(BrokenPayload):
        sealer.open(changed, sealer.encoding, request_id, part)  # type: ignore[arg-type]


@pytest.mark.parametrize("sealed", [b"", b"rubbish", zlib.compress(b"x" * 50)[:-5]])
def test_what_is_no_zlib_does_not_open(sealed: bytes) -> None:
    with pytest.raises(BrokenPayload):
        Sealer().open(sealed, "zlib", "r", "request")
    with pytest.raises(BrokenPayload, match="encoding"):
        Sealer().open(sealed, "gzip", "r", "request")


def test_what_grows_without_end_is_not_opened() -> None:
    with pytest.raises(BrokenPayload, match="larger"):
        Sealer().open(zlib.compress(bytes(MAX_OPENED_BYTES + 1)), "zlib", "r", "request")


@pytest.mark.parametrize("more", [0, 1, 10_000_000])
def test_no_more_is_opened_than_is_asked_for(more: int) -> None:
    sealer = Sealer([OLD])
    sealed = sealer.seal(bytes(1000 + more), "r", "request")
    if not more:
        assert len(sealer.open(sealed, sealer.encoding, "r", "request", 1000)) == 1000
        return
    with pytest.raises(TooLargeToOpen):
        sealer.open(sealed, sealer.encoding, "r", "request", 1000)


def test_keys_are_32_bytes_in_hex_or_base64() -> None:
    text = SecretStr("6e" * 32 + "\n bm5ubm5ubm5ubm5ubm5ubm5ubm5ubm5ubm5ubm5ubm4=")
    assert parse_keys(text) == [NEW, NEW]
    assert parse_keys(None) == []
    for bad in ("", " \n", "abc", "zz" * 32, "6e" * 31):
        with pytest.raises(BadPayloadKey) as caught:
            parse_keys(SecretStr(bad))
        assert not bad.strip() or bad not in str(caught.value)
