"""Personal data is found by its form and check digits, and everything else is left as it is."""

import json
import time

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ledger.payloads.iban import IBAN_CHARS
from ledger.payloads.redaction import Redactor, UnredactablePrompt, is_card, is_iban

SEPARATORS = st.sampled_from(["", " ", "-"])


def with_luhn_digit(digits: str) -> str:
    return next(digits + last for last in "0123456789" if is_card(digits + last) or luhn(digits + last))


def luhn(digits: str) -> bool:
    """Luhn's sum as Wikipedia puts it: from the right, every second digit doubled, digits of products added."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if place % 2 else 1)
        total += value // 10 + value % 10
    return total % 10 == 0


def iban_of(country: str, account: str) -> str:
    """ISO 13616: check digits are 98 less the remainder of the number with 00 in their place."""
    number = "".join(str(int(c, 36)) for c in account + country + "00")
    return f"{country}{98 - int(number) % 97:02d}{account}"


def grouped(text: str, separator: str) -> str:
    return separator.join(text[at : at + 4] for at in range(0, len(text), 4))


@given(st.text("0123456789", min_size=11, max_size=17), st.sampled_from("23456"), SEPARATORS)
def test_a_valid_card_number_is_found_however_it_is_grouped(rest: str, first: str, separator: str) -> None:
    card = with_luhn_digit(first + rest)
    text = f"pay with {grouped(card, separator)}, please"
    assert Redactor().text(text) == "pay with [CARD_1], please"


@given(st.text("0123456789", min_size=15, max_size=15), st.sampled_from("23456"), st.integers(1, 9))
def test_a_card_number_with_a_wrong_check_digit_is_left(rest: str, first: str, off: int) -> None:
    card = with_luhn_digit((first + rest)[:15])
    wrong = card[:-1] + str((int(card[-1]) + off) % 10)
    assert not luhn(wrong)
    assert Redactor().text(f"no. {wrong}.") == f"no. {wrong}."


@given(st.sampled_from(sorted(IBAN_CHARS)), st.data(), SEPARATORS, st.booleans())
def test_a_valid_iban_is_found_and_one_with_other_check_digits_is_not(
    country: str, data: st.DataObject, separator: str, is_lower: bool
) -> None:
    length = IBAN_CHARS[country] - 4
    account = data.draw(st.text("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=length, max_size=length))
    iban = iban_of(country, account)
    written = grouped(iban.lower() if is_lower else iban, separator)
    assert Redactor().text(f"to {written} AND MORE") == "to [IBAN_1] AND MORE"
    wrong = f"{country}{(int(iban[2:4]) + 1) % 97 + 2:02d}{account}"
    assume(not is_iban(wrong))
    assert "[IBAN_" not in Redactor().text(f"to {wrong}")


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("mail Ann.Lee+x@Mail.example.co.uk.", "mail [EMAIL_1]."),
        ("a@b.de, A@B.de, c@d.de, a@b.de", "[EMAIL_1], [EMAIL_1], [EMAIL_2], [EMAIL_1]"),
        ("müller@straße.example", "[EMAIL_1]"),
        ("not@home, @decorator, x@y.1", "not@home, @decorator, x@y.1"),
        ("from 203.0.113.9 to 2001:db8::7.", "from [IP_2] to [IP_1]."),
        ("on 127.0.0.1 and ::1, 1.2.3 and 300.1.1.1", "on 127.0.0.1 and ::1, 1.2.3 and 300.1.1.1"),
        ("std::vector a::b 12:30:45 aa:bb", "std::vector a::b 12:30:45 aa:bb"),
        ("+49 171 1234567 or +1 (555) 123-4567", "[PHONE_1] or [PHONE_2]"),
        ("call (555) 123-4567, 555-123-4567, 0171/1234567", "call [PHONE_1], [PHONE_1], [PHONE_2]"),
        ("2026-05-31 01-02-2024 12:00, 3.14159265358979, 1234567890", None),
        ("DE89 3704 0044 0532 0130 00", "[IBAN_1]"),
        ("order 12 4111 1111 1111 1111", "order 12 [CARD_1]"),
        ("7 " + "4111 1111 1111 1111 " * 9, "7 " + "[CARD_1] " * 9),
        ("4111 1111 1111 1111 9a", "[CARD_1] 9a"),
        ("4111 1111 1111 1111a", None),
        ("sk-sw-" + "a1B2" * 11, "[API_KEY_1]"),
        ("the prefix sk-sw-abc", None),
        ("a line\r\nanother  \n\n", None),
    ],
)
def test_examples(text: str, redacted: str | None) -> None:
    assert Redactor().text(text) == (text if redacted is None else redacted)


def test_placeholders_are_the_same_over_request_and_answer() -> None:
    redactor = Redactor()
    body = {"messages": [{"role": "user", "content": "I am a@b.de"}], "seed": 4111111111111111, "user": "x@y.de"}
    assert redactor.request(body) == {
        "messages": [{"role": "user", "content": "I am [EMAIL_1]"}],
        "seed": 4111111111111111,
        "user": "[EMAIL_2]",
    }
    unknown = {"card": 4111111111111111, "x@y.de": True, "max_tokens": 5}
    assert redactor.request(unknown) == {"card": "[CARD_1]", "[EMAIL_2]": True, "max_tokens": 5}
    assert redactor.value([{"text": "Hello a@b.de"}]) == [{"text": "Hello [EMAIL_1]"}]


def test_arguments_of_calls_stay_json() -> None:
    arguments = {"card": 4111111111111111, "a@b.de": {"to": ['say "hi" to c@d.de', 5, True, None]}}
    call = {"function": {"name": "pay", "arguments": json.dumps(arguments)}}
    redacted = json.loads(Redactor().value(call)["function"]["arguments"])
    assert redacted == {"card": "[CARD_1]", "[EMAIL_1]": {"to": ['say "hi" to [EMAIL_2]', 5, True, None]}}
    plain = {"arguments": '{"a":  1}'}
    assert Redactor().value(plain) == plain
    assert Redactor().value({"arguments": "{a@b.de"}) == {"arguments": "{[EMAIL_1]"}


def test_token_ids_cannot_be_redacted() -> None:
    with pytest.raises(UnredactablePrompt):
        Redactor().request({"prompt": [1, 2, 3]})


@given(st.text())
@example("[EMAIL_1]\x1c\x85")
def test_what_was_redacted_has_nothing_left_to_redact(text: str) -> None:
    once = Redactor().text(text)
    assert Redactor().text(once) == once


@pytest.mark.parametrize("piece", ["a", "1", "1 ", "a.", "::", "1.", "+1", "@", "a@", "GB12", "0-", "(1"])
def test_no_text_makes_it_slow(piece: str) -> None:
    short_s, long_s = (min(seconds_of(piece * (size // len(piece))) for _ in range(2)) for size in (6_250, 100_000))
    assert long_s < 64 * short_s  # between 16 and 256, each four times away: others share caches and cores


def seconds_of(text: str) -> float:
    """Return the processor time of this thread that redacting takes."""
    started_s = time.thread_time()
    Redactor().text(text)
    return time.thread_time() - started_s
