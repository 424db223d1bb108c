"""Stop strings are found wherever the text is split, and nothing else is held back or released."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from engine.text.stop_strings import Automaton, StopStrings, automaton_of

few_letters = st.text("ab\n", max_size=30)
few_stops = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=6)


class NaiveStopStrings:
    """The same, by searching for every string everywhere."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        self.held += text
        found = [(at, stop) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: hit[0])
            return self.held[:at], stop
        begun = [n for n in range(1, len(self.held) + 1) if any(stop.startswith(self.held[-n:]) for stop in self.stops)]
        shown = len(self.held) - max(begun, default=0)
        released, self.held = self.held[:shown], self.held[shown:]
        return released, None


@given(st.lists(st.text("ab\n", max_size=8), max_size=8), few_stops)
@example(["abab"], ["bab", "abab", "b"])
@example(["ab", "c"], ["abc", "abd", "b\n"])
def test_it_agrees_with_a_naive_search(texts: list[str], stops: list[str]) -> None:
    quick, naive = StopStrings(tuple(stops)), NaiveStopStrings(tuple(stops))
    for text in texts:
        outcome = quick.push(text)
        assert outcome == naive.push(text)
        if outcome[1] is not None:
            return


def test_a_character_costs_a_step_or_two() -> None:
    """The cost does not depend on the strings' length or on partial matches. Regression: it was quadratic."""
    looks = 0

    class CountedEdges(dict[str, int]):
        def get(self, char: str) -> int | None:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return super().get(char)

    stops = tuple("a" * 500 + ending for ending in "bcdefghijklmnopq")
    automaton: Automaton = automaton_of(stops)
    automaton.edges = [CountedEdges(edges) for edges in automaton.edges]
    matcher = StopStrings(stops)
    text = ("a" * 499 + "x") * 20
    shown = "".join(matcher.push(char)[0] for char in text)
    assert shown == text
    assert looks <= 2 * len(text)


@given(few_letters, st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 30)))
@example("aab", ["ab"], [1, 2])  # the second "a" begins the stop that the first one seemed to begin
def test_any_split_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    matcher = StopStrings(tuple(stops))
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, hit = "", None
    for start, end in pairwise(edges):
        released, hit = matcher.push(text[start:end])
        shown += released
        held = text[len(shown) : end]
        if hit is not None:
            break
        # Only what could still become a stop string is held back.
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    if hit is None:
        assert shown + matcher.end()[0] == text
        assert not found
    else:
        # The first complete stop ends the text; another that began earlier may not have been complete yet.
        assert text.startswith(shown + hit)
        assert len(shown) >= min(found)


def test_halves_of_a_stop_string_do_not_leak() -> None:
    # Regression: TGI 1254, vLLM 2577, SGLang 11462.
    matcher = StopStrings(("\nUser:",))
    assert matcher.push("Hello.\nUs") == ("Hello.", None)
    assert matcher.push("er") == ("", None)
    assert matcher.push(": hi") == ("", "\nUser:")


def test_a_false_start_is_released() -> None:
    matcher = StopStrings(("\nUser:",))
    assert matcher.push("Hello.\nUs") == ("Hello.", None)
    assert matcher.push("ed") == ("\nUsed", None)
    assert matcher.end()[0] == ""
