"""File formats of exports: CSV, JSON Lines, Parquet. Columns are those of db.tables.RequestRow."""

import csv
import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from sqlalchemy import BigInteger, Boolean, Double

from db.tables import RequestRow
from ledger.csv_cells import guarded
from ledger.queries.log import Row

COLUMNS: Final = tuple(column.name for column in RequestRow.__table__.columns)


class RowWriter(Protocol):
    """A file that is being written."""

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows. Raises OSError."""

    def close(self) -> None:
        """Complete the file. Raises OSError."""


class _CsvWriter:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._csv = csv.writer(self._file)
        self._csv.writerow(COLUMNS)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows; NULL is an empty field."""
        self._csv.writerows(guarded(row, COLUMNS) for row in rows)

    def close(self) -> None:
        self._file.close()


class _JsonLinesWriter:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, rows: Sequence[Row]) -> None:
        self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def close(self) -> None:
        self._file.close()


class _ParquetWriter:
    def __init__(self, path: Path) -> None:
        # Imported on first use: it is large, and an extra.
        self._arrow: Any = importlib.import_module("pyarrow")
        types = {BigInteger: self._arrow.int64(), Double: self._arrow.float64(), Boolean: self._arrow.bool_()}
        columns = RequestRow.__table__.columns
        fields = [(column.name, types.get(type(column.type), self._arrow.string())) for column in columns]
        self._schema = self._arrow.schema(fields)
        self._file = importlib.import_module("pyarrow.parquet").ParquetWriter(path, self._schema)

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
    open_writer: Callable[[Path], RowWriter]
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
