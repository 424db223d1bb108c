"""Finds stop strings in streamed text and holds back only what could still become one.

Uses the automaton of Aho and Corasick (Communications of the ACM 18, 1975, 333-340): each character costs a step or
two, for any length and number of strings and any split of the text.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from engine.types import ContentFinder

CACHED_AUTOMATA: Final = 16  # for the choices of one request; 8 KiB of strings take 2.5 MiB
ROOT: Final = 0


class Automaton:
    """All prefixes of some strings; each is a node, numbered from the empty one."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self.edges: list[dict[str, int]] = [{}]  # of each node: next character → the prefix longer by it
        self.depth = [0]  # of each node: characters
        self.fallback = [ROOT]  # of each node: the longest prefix that it ends with
        self.found = [-1]  # of each node: number of the longest string that it ends with; -1: none
        for number, string in enumerate(strings):
            self._add(number, string)
        self._link()

    def _add(self, number: int, string: str) -> None:
        node = ROOT
        for char in string:
            if char not in self.edges[node]:
                self.edges[node][char] = len(self.edges)
                self.edges.append({})
                self.depth.append(self.depth[node] + 1)
                self.fallback.append(ROOT)
                self.found.append(-1)
            node = self.edges[node][char]
        if self.found[node] < 0:
            self.found[node] = number

    def _link(self) -> None:
        nodes = list(self.edges[ROOT].values())
        for node in nodes:  # shortest first; it grows during the loop
            for char, longer in self.edges[node].items():
                self.fallback[longer] = self.after(self.fallback[node], char)
                if self.found[longer] < 0:
                    self.found[longer] = self.found[self.fallback[longer]]
                nodes.append(longer)

    def after(self, node: int, char: str) -> int:
        """Return the node of the longest prefix that the text ends with, after one more character."""
        while (longer := self.edges[node].get(char)) is None:
            if node == ROOT:
                return ROOT
            node = self.fallback[node]
        return longer


automaton_of = lru_cache(CACHED_AUTOMATA)(Automaton)


class StopStrings:
    """One choice's stop strings and its text not yet released."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = automaton_of(stops) if stops else None
        self._node = ROOT
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that may be shown now, and the stop string that was found (nothing follows it).

        If several end in this text, the one that begins first is returned.
        """
        automaton = self._automaton
        if automaton is None:
            return text, None
        node, hits = self._node, []
        for at, char in enumerate(text, start=len(self._held) + 1):
            node = automaton.after(node, char)
            number = automaton.found[node]
            if number >= 0:
                hits.append((at - len(automaton.strings[number]), number))
        self._held += text
        self._node = node
        if hits:
            begin, number = min(hits)
            released, self._held, self._node = self._held[:begin], "", ROOT
            return released, automaton.strings[number]
        shown = len(self._held) - automaton.depth[node]
        released, self._held = self._held[:shown], self._held[shown:]
        return released, None

    def skip(self, text: str) -> str:
        """Pass through text in which stop strings do not apply; return it."""
        return text

    def end(self) -> tuple[str, str | None]:
        """Return the text that was held back, without a complete stop string, and None."""
        released, self._held, self._node = self._held, "", ROOT
        return released, None

    @property
    def held_chars(self) -> int:
        """Number of characters held back."""
        return len(self._held)


class ContentStopStrings:
    """Stop strings as ``StopStrings``, searched in the content only. One does not span two stretches of it."""

    def __init__(self, stops: tuple[str, ...], finder: ContentFinder) -> None:
        self._stops = StopStrings(stops)
        self._finder = finder
        self._held = ""
        self._begin = 0  # offset of the held text in the complete text
        self._skipped = 0  # characters at the beginning to which stop strings do not apply
        self._looked_at = 0  # offset in the complete text

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that may be shown now, and the stop string that was found (nothing follows it)."""
        return self._read(text, is_last=False)

    def skip(self, text: str) -> str:
        """Pass through text in which stop strings do not apply; return it."""
        self._finder.push(text, is_last=False)
        self._begin = self._skipped = self._skipped + len(text)
        return text

    def end(self) -> tuple[str, str | None]:
        """Return the text that was held back, up to a stop string if there is one, and that string."""
        return self._read("", is_last=True)

    def _read(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        self._held += text
        for start, end in self._finder.push(text, is_last=is_last):
            begin = max(start, self._skipped)
            if begin >= end:
                continue
            if begin != self._looked_at:
                self._stops.end()
            first = begin - self._stops.held_chars
            shown, stop = self._stops.push(self._held[begin - self._begin : end - self._begin])
            self._looked_at = end
            if stop is not None:
                released, self._held = self._held[: first + len(shown) - self._begin], ""
                return released, stop
        read_chars = max(self._begin, self._finder.read_chars)
        if is_last or read_chars > self._looked_at:
            self._stops.end()
        shown_chars = len(self._held) if is_last else read_chars - self._stops.held_chars - self._begin
        released, self._held = self._held[:shown_chars], self._held[shown_chars:]
        self._begin += shown_chars
        return released, None


def stop_strings(
    stops: tuple[str, ...], content_finder: Callable[[], ContentFinder] | None
) -> StopStrings | ContentStopStrings:
    """Return a finder of one choice's stop strings; ``content_finder``: see ``GenerationRequest``."""
    if content_finder is None or not stops:
        return StopStrings(stops)
    return ContentStopStrings(stops, content_finder())
