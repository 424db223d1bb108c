"""Finds stop strings in streamed text and holds back only what could still become one.

Uses the automaton of Aho and Corasick (Communications of the ACM 18, 1975, 333-340): however long and however many the
strings are, and wherever the text is cut, each character costs a step or two.
"""

from functools import lru_cache
from typing import Final

CACHED_AUTOMATA: Final = 16  # for the choices of one request; of 8 KiB, one takes 2.5 MiB
ROOT: Final = 0


class Automaton:
    """All prefixes of some strings; each is a node, numbered from the empty one."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self.edges: list[dict[str, int]] = [
            {}
        ]  # of each node: by the next character, the beginning that is longer by it
        self.depth = [0]  # of each node: characters
        self.fallback = [ROOT]  # of each node: the longest beginning that it ends with
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
        for node in nodes:  # the shortest first; it grows meanwhile
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
        """Add text; return what may be shown now, and the stop string that was found (nothing follows it).

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

    def flush(self) -> str:
        """Return the text held back: the choice ended without completing a stop string."""
        released, self._held, self._node = self._held, "", ROOT
        return released
