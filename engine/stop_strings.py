"""Finds stop strings in streamed text and holds back only what could still become one."""


class StopStrings:
    """One choice's stop strings and its text not yet released."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what may be shown now, and the stop string that was found (nothing follows it)."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: hit[0])
            released, self._held = self._held[:at], ""
            return released, stop
        keep = self._possible_stop_chars()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released, None

    def flush(self) -> str:
        """Return what was held back: the choice ended without completing it."""
        released, self._held = self._held, ""
        return released

    def _possible_stop_chars(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        longest = min(max(map(len, self._stops)) - 1, len(self._held))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
