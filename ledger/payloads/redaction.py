"""Redacting personal data in payloads: placeholders such as ``[EMAIL_1]``, equal for equal values in one payload.

Numbers with a check digit are redacted only if it is correct (cards: Luhn, ISO/IEC 7812; accounts: IBAN, ISO 13616,
modulo 97), so that other numbers are kept. Names and postal addresses are not detected: that needs a model.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from typing import Any, Final

from ledger.payloads.iban import IBAN_CHARS

# All patterns are linear: quantifiers are bounded, or nothing that could fail follows them.
_API_KEY: Final = re.compile(r"(?<!\w)sk-sw-[A-Za-z0-9]{20,250}")
_EMAIL: Final = re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}(?![\w-])")
_IBAN_START: Final = re.compile(r"(?<![^\W_])[A-Za-z]{2}[0-9]{2}(?=[ -]?[A-Za-z0-9])")
_DIGITS: Final = re.compile(r"(?<![\w.])[0-9](?:[ -]?[0-9]){12,}")
_GROUP: Final = re.compile(r"[0-9]+")
_WORD: Final = re.compile(r"\w")
_IPV6: Final = re.compile(r"(?<![\w:.])[0-9A-Fa-f:.]{2,45}(?![\w:])")
_IPV4: Final = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\w|\.[0-9])")
_PHONE: Final = re.compile(
    r"(?<![\w.+-])(?:"
    r"(?:\+|00)[1-9](?:[ ()./-]{0,2}[0-9]){7,13}"  # international, E.164: at most 15 digits
    r"|\([0-9]{2,5}\) ?[0-9]{3,4}(?:[ -]?[0-9]{2,5}){1,3}"  # (555) 123-4567
    r"|[2-9][0-9]{2}([ .-])[0-9]{3}\1[0-9]{4}"  # 555-123-4567
    r"|0[0-9]{2,4}[ /-][0-9]{3,8}(?:[ -][0-9]{2,6}){0,2}"  # 0171/1234567
    r")(?![\w-])"
)
CARD_DIGITS: Final = range(13, 20)
CARD_FIRST_DIGITS: Final = "23456"  # of payment cards


class UnredactablePrompt(ValueError):
    """The prompt is token ids, which cannot be searched."""


class Redactor:
    """Redacts one payload. Numbers its placeholders by value, in order of appearance."""

    def __init__(self) -> None:
        self._placeholders: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Redact a request's body. Raises UnredactablePrompt."""
        if not isinstance(body.get("prompt", ""), str):
            raise UnredactablePrompt
        # A seed can have as many digits as a card number.
        return {self.text(name): value if name == "seed" else self.value(value) for name, value in body.items()}

    def value(self, value: Any) -> Any:  # noqa: ANN401  # any JSON
        """Redact all strings of a JSON value, keys included, and card numbers that are numbers."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self._member(key, item) for key, item in value.items()}
        if isinstance(value, int) and not isinstance(value, bool) and is_card(str(value)):
            return self._placeholder("CARD", str(value))
        return value

    def _member(self, key: str, value: Any) -> Any:  # noqa: ANN401
        if key == "arguments" and isinstance(value, str):
            return self._arguments(value)
        return self.value(value)

    def _arguments(self, text: str) -> str:
        """Redact the arguments of a call: JSON in a string, which must stay JSON."""
        try:
            arguments = json.loads(text)
            redacted = self.value(arguments)
        except (ValueError, RecursionError):
            return self.text(text)
        return text if redacted == arguments else json.dumps(redacted, ensure_ascii=False)

    def text(self, text: str) -> str:
        """Redact a text line by line, so that other threads can run in between."""
        return "".join([self._line(line) for line in text.splitlines(keepends=True)])

    def _line(self, line: str) -> str:
        for find in _FINDERS:
            line = self._replaced(line, find)
        return line

    def _replaced(self, line: str, find: "Finder") -> str:
        pieces, done = [], 0
        for start, end, kind, value in find(line):
            pieces += [line[done:start], self._placeholder(kind, value)]
            done = end
        return "".join([*pieces, line[done:]]) if done else line

    def _placeholder(self, kind: str, value: str) -> str:
        placeholder = self._placeholders.get((kind, value))
        if placeholder is None:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            placeholder = self._placeholders[kind, value] = f"[{kind}_{self._counts[kind]}]"
        return placeholder


Found = tuple[int, int, str, str]  # begin, end, kind, and the value that decides which placeholder it gets
Finder = Callable[[str], Iterator[Found]]


def _api_keys(text: str) -> Iterator[Found]:
    for found in _API_KEY.finditer(text):
        yield *found.span(), "API_KEY", found.group()


def _emails(text: str) -> Iterator[Found]:
    if "@" in text:
        for found in _EMAIL.finditer(text):
            yield *found.span(), "EMAIL", found.group().lower()


def _ibans(text: str) -> Iterator[Found]:
    done = 0
    for found in _IBAN_START.finditer(text):
        length = IBAN_CHARS.get(found.group()[:2].upper())
        if length is None or found.start() < done:
            continue
        end = _end_of_chars(text, found.start(), length)
        iban = "".join(c for c in text[found.start() : end] if c.isalnum()).upper()
        if is_iban(iban):
            done = end
            yield found.start(), end, "IBAN", iban


def _end_of_chars(text: str, start: int, count: int) -> int:
    """Return the end of this many letters and digits, separated by single spaces or hyphens or not; else ``start``."""
    at = start
    while count:
        if at > start and text[at : at + 1] in {" ", "-"}:
            at += 1
        if not (text[at : at + 1].isascii() and text[at : at + 1].isalnum()):
            return start
        at, count = at + 1, count - 1
    return start if text[at : at + 1].isalnum() else at


def _cards(text: str) -> Iterator[Found]:
    for run in _DIGITS.finditer(text):
        groups = [(group.start() + run.start(), group.group()) for group in _GROUP.finditer(run.group())]
        if _WORD.match(text, run.end()):
            groups.pop()
        first = 0
        while first < len(groups):
            card = _card_at(groups, first)
            if card is None:
                first += 1
                continue
            last, digits = card
            yield groups[first][0], groups[last][0] + len(groups[last][1]), "CARD", digits
            first = last + 1


def _card_at(groups: list[tuple[int, str]], first: int) -> tuple[int, str] | None:
    """Return the longest card number that starts with this group of digits: its last group, and its digits."""
    digits, card = "", None
    for last in range(first, len(groups)):
        digits += groups[last][1]
        if len(digits) >= CARD_DIGITS.stop:
            break
        if is_card(digits):
            card = last, digits
    return card


def _addresses(text: str) -> Iterator[Found]:
    if text.count(":") > 1:
        for found in _IPV6.finditer(text):
            candidate = found.group().rstrip(".")
            if candidate.count(":") > 1 and any(c.isdigit() for c in candidate) and is_address(candidate):
                yield found.start(), found.start() + len(candidate), "IP", str(ip_address(candidate))


def _old_addresses(text: str) -> Iterator[Found]:
    for found in _IPV4.finditer(text):
        if is_address(found.group()):
            yield *found.span(), "IP", found.group()


def _phones(text: str) -> Iterator[Found]:
    for found in _PHONE.finditer(text):
        yield *found.span(), "PHONE", "".join(c for c in found.group() if c.isdigit())


# Longer and more specific patterns first.
_FINDERS: Final[tuple[Finder, ...]] = (_api_keys, _emails, _ibans, _cards, _addresses, _old_addresses, _phones)


def is_card(digits: str) -> bool:
    """Return whether these digits are a payment card's number, by the Luhn checksum."""
    if len(digits) not in CARD_DIGITS or digits[0] not in CARD_FIRST_DIGITS:
        return False
    doubled = (2 * int(digit) for digit in digits[-2::-2])
    return (sum(map(int, digits[::-2])) + sum(n - 9 if n > 9 else n for n in doubled)) % 10 == 0


def is_iban(text: str) -> bool:
    """Return whether a text is an IBAN, in capitals and without spaces."""
    if len(text) != IBAN_CHARS.get(text[:2]):
        return False
    return int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def is_address(text: str) -> bool:
    """Return whether a text is an IP address that may belong to a person."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)
