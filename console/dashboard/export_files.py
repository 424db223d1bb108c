"""File formats of exports: CSV, JSON Lines, Parquet. Columns are those of db.tables.RequestRow."""

import codecs
import csv
import importlib
import importlib.util
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from sqlalchemy import BigInteger, Boolean, Double

from db.tables import RequestRow
from ledger.csv_cells import guarded
from ledger.queries.log import Row

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

COLUMNS: Final = tuple(column.name for column in RequestRow.__table__.columns)


class Sink(io.RawIOBase):
    """A file that is read in parts while it is written."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._written_bytes = 0

    def writable(self) -> bool:
        """Implement ``RawIOBase``."""
        return True

    def write(self, data: "ReadableBuffer", /) -> int:
        """Append bytes."""
        part = bytes(data)
        self._parts.append(part)
        self._written_bytes += len(part)
        return len(part)

    def tell(self) -> int:
        """Return how many bytes were written in all: Parquet's footer says where its parts begin."""
        return self._written_bytes

    def take(self) -> bytes:
        """Return the bytes written since the last call."""
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken


class RowWriter(Protocol):
    """A file that is being written."""

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows."""

    def close(self) -> None:
        """Complete the file."""


class _CsvWriter:
    def __init__(self, file: Sink) -> None:
        self._csv = csv.writer(codecs.getwriter("utf-8")(file))
        self._csv.writerow(COLUMNS)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows; NULL is an empty field."""
        self._csv.writerows(guarded(row, COLUMNS) for row in rows)

    def close(self) -> None:
        """Do nothing: the file is complete."""


class _JsonLinesWriter:
    def __init__(self, file: Sink) -> None:
        self._file = file

    def write(self, rows: Sequence[Row]) -> None:
        self._file.write("".join([json.dumps(row, ensure_ascii=False) + "\n" for row in rows]).encode())

    def close(self) -> None:
        """Do nothing: the file is complete."""


class _ParquetWriter:
    def __init__(self, file: Sink) -> None:
        # Imported on first use: it is large, and an extra.
        self._arrow: Any = importlib.import_module("pyarrow")
        types = {BigInteger: self._arrow.int64(), Double: self._arrow.float64(), Boolean: self._arrow.bool_()}
        columns = RequestRow.__table__.columns
        fields = [(column.name, types.get(type(column.type), self._arrow.string())) for column in columns]
        self._schema = self._arrow.schema(fields)
        self._file = importlib.import_module("pyarrow.parquet").ParquetWriter(file, self._schema)

    def write(self, rows: Sequence[Row]) -> None:
        if rows:
            self._file.write_table(self._arrow.Table.from_pylist(list(rows), schema=self._schema))

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A file format; its name in FORMATS is the files' suffix."""

    title: str
    media_type: str
    open_writer: Callable[[Sink], RowWriter]
    needs: str | None = None  # a package of the extra ``export``

    @property
    def is_available(self) -> bool:
        """True if the package that it needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


FORMATS: Final = {
    "csv": FileFormat("CSV", "text/csv; charset=utf-8", _CsvWriter),
    "jsonl": FileFormat("JSON Lines", "application/jsonl", _JsonLinesWriter),
    "parquet": FileFormat("Parquet", "application/vnd.apache.parquet", _ParquetWriter, needs="pyarrow"),
}
