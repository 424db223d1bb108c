"""Candidates for export, on disk: a conversation can be classified only when all have been read."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

_TABLES = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE examples (position INTEGER PRIMARY KEY, prompt BLOB, part TEXT, line BLOB);
CREATE TABLE endings (position INTEGER, hash BLOB);
CREATE INDEX endings_by_position ON endings (position);
CREATE TABLE beginnings (hash BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE prompts (hash BLOB PRIMARY KEY) WITHOUT ROWID;
"""
_EXAMPLES = """
SELECT prompt, part, line, EXISTS (
    SELECT 1 FROM endings JOIN beginnings ON beginnings.hash = endings.hash WHERE endings.position = examples.position
) FROM examples ORDER BY position
"""


class ExampleSpool:
    """Examples in the order in which they were added."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.executescript(_TABLES)
        self._database.execute("BEGIN")

    def add(self, prompt: bytes, part: str, line: bytes, *, endings: list[bytes], beginnings: list[bytes]) -> None:
        """Add an example; hashes as ledger.training.conversation has them."""
        added = self._database.execute(
            "INSERT INTO examples (prompt, part, line) VALUES (?, ?, ?)", (prompt, part, line)
        )
        position = added.lastrowid
        self._database.executemany("INSERT INTO endings VALUES (?, ?)", [(position, ending) for ending in endings])
        self._database.executemany("INSERT OR IGNORE INTO beginnings VALUES (?)", [(hash_,) for hash_ in beginnings])

    def classified(self) -> Iterator[tuple[str, bytes, str | None]]:
        """Yield part, line and exclusion reason of each: a longer one continues it, or an earlier one repeats it."""
        for prompt, part, line, is_continued in self._database.execute(_EXAMPLES):
            if is_continued:
                yield part, line, "continued"
            elif self._database.execute("INSERT OR IGNORE INTO prompts VALUES (?)", (prompt,)).rowcount:
                yield part, line, None
            else:
                yield part, line, "duplicate"

    def close(self) -> None:
        """Close the database."""
        self._database.close()
