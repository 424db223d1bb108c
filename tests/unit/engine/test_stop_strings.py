"""Stop strings: found wherever the text is cut, and nothing else is held back or let out."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from engine.stop_strings import StopStrings

few_letters = st.text("ab\n", max_size=30)


@given(few_letters, st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 30)))
@example("aab", ["ab"], [1, 2])  # the second "a" begins the stop that the first one seemed to begin
def test_any_cutting_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
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
        # Held back is only what could still become a stop string.
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    if hit is None:
        assert shown + matcher.flush() == text
        assert not found
    else:
        # The first stop to be complete ends the text; another that began earlier may not have been complete yet.
        assert text.startswith(shown + hit)
        assert len(shown) >= min(found)


def test_halves_of_a_stop_string_do_not_leak() -> None:
    # TGI 1254, vLLM 2577, SGLang 11462.
    matcher = StopStrings(("\nUser:",))
    assert matcher.push("Hello.\nUs") == ("Hello.", None)
    assert matcher.push("er") == ("", None)
    assert matcher.push(": hi") == ("", "\nUser:")


def test_a_false_start_is_released() -> None:
    matcher = StopStrings(("\nUser:",))
    assert matcher.push("Hello.\nUs") == ("Hello.", None)
    assert matcher.push("ed") == ("\nUsed", None)
    assert matcher.flush() == ""
