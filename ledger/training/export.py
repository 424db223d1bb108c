"""Writes a training set into a new folder, completely or not at all."""

import hashlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Struct
from msgspec.structs import asdict
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.audit import Change, record
from db.engine import changing
from ledger.payloads.errors import ExportError
from ledger.payloads.sealing import Sealer
from ledger.payloads.store import open_row
from ledger.training.conversation import ExcludedFromExport, beginnings, conversation_of, prompt_hash, root
from ledger.training.example_spool import ExampleSpool
from ledger.training.formats import FORMATS
from ledger.training.rows import ExportFilter, Row, consenting_keys, count_rows, read_rows
from ledger.training.rules import check
from ledger.training.split import Split

MANIFEST_VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"


class ExportPlan(Struct, frozen=True):
    """The selection and the format of an export."""

    wanted: ExportFilter
    format: str = "openai"  # one of FORMATS
    min_turns: int = 1
    shares: tuple[float, ...] = (0.9, 0.05, 0.05)
    seed: int = 0
    keep_failovers: bool = False  # also answers that more than one worker generated
    actor: str = "system"  # as the audit log names who exports
    page_rows: int = 50  # read at a time, of at most some MB each


class Exported(Struct):
    """One file of the set."""

    examples: int = 0
    bytes: int = 0
    sha256: str = ""


class Exporter:
    """Writes one training set."""

    def __init__(self, engine: AsyncEngine, sealer: Sealer, plan: ExportPlan, tool_version: str) -> None:
        """Raise ExportError for invalid shares."""
        self._engine = engine
        self._sealer = sealer
        self._plan = plan
        self._tool_version = tool_version
        self._split = Split(plan.shares, plan.seed)
        self._excluded: Counter[str] = Counter()
        self._read = 0

    async def write(self, out: Path, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
        """Write the set into ``out``, which must not exist; return its manifest.

        ``on_progress`` receives the rows read and the total. Raises ExportError, the errors of opening payloads, and
        SQLAlchemy's errors.
        """
        draft = self._new_folder(out)
        try:
            with closing(ExampleSpool(draft / "scratch.db")) as scratch:
                await self._gather(scratch, on_progress)
                files = self._write_parts(draft, scratch)
            (draft / "scratch.db").unlink()
            manifest = self._manifest(files)
            (draft / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
            draft.rename(out)
        except OSError as error:
            raise ExportError(f"{out}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return manifest

    def _new_folder(self, out: Path) -> Path:
        """Create a folder beside ``out`` that only this user may read."""
        if out.exists():
            raise ExportError(f"{out} already exists. Choose a new folder")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        except OSError as error:
            raise ExportError(f"{out.parent}: {error.strerror or error}") from error

    async def _gather(self, scratch: ExampleSpool, on_progress: Callable[[int, int], None]) -> None:
        total = await count_rows(self._engine, self._plan.wanted)
        wanted = {name: value for name, value in asdict(self._plan.wanted).items() if value is not None}
        async with changing(self._engine) as connection:
            await record(connection, Change(self._plan.actor, "payloads.export", "", after={"rows": total, **wanted}))
        consenting = await consenting_keys(self._engine)
        on_progress(0, total)
        async for row in read_rows(self._engine, self._plan.wanted, self._plan.page_rows):
            self._read += 1
            try:
                self._add(scratch, row, has_consent=row["key_id"] in consenting)
            except ExcludedFromExport as reason:
                self._excluded[str(reason)] += 1
            on_progress(self._read, total)

    def _add(self, scratch: ExampleSpool, row: Row, *, has_consent: bool) -> None:
        """Add one row's conversation. Raises ExcludedFromExport."""
        self._check_row(row, has_consent=has_consent)
        payload = open_row(row, self._sealer)
        if payload.request is None or payload.choices is None:
            raise ExcludedFromExport("too_large_to_keep")
        conversation = conversation_of(payload.request, payload.choices)
        if conversation.turns < self._plan.min_turns:
            raise ExcludedFromExport("too_few_turns")
        check(conversation)
        scratch.add(
            prompt_hash(conversation),
            self._split.part_of(root(conversation)),
            msgspec.json.encode(FORMATS[self._plan.format](conversation)),
            endings=conversation.endings,
            beginnings=beginnings(conversation),
        )

    def _check_row(self, row: Row, *, has_consent: bool) -> None:
        if not row["train_ok"]:
            raise ExcludedFromExport("no_consent")
        if not has_consent:
            raise ExcludedFromExport("consent_revoked")
        if row["outcome"] is None:
            raise ExcludedFromExport("no_usage_record")  # its outcome is unknown
        if row["outcome"] != "ok":
            raise ExcludedFromExport("failed")
        if row["attempts"] > 1 and not self._plan.keep_failovers:
            raise ExcludedFromExport("failed_over")

    def _write_parts(self, folder: Path, scratch: ExampleSpool) -> dict[str, Exported]:
        exported = {name: Exported() for name in self._split.parts}
        hashes = {name: hashlib.sha256() for name in exported}
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {
                name: stack.enter_context((folder / f"{name}.jsonl").open("xb")) for name in exported
            }
            for part, example, reason in scratch.classified():
                if reason is not None:
                    self._excluded[reason] += 1
                    continue
                line = example + b"\n"
                files[part].write(line)
                hashes[part].update(line)
                exported[part].examples += 1
                exported[part].bytes += len(line)
        for name, hash_ in hashes.items():
            exported[name].sha256 = hash_.hexdigest()
        return {f"{name}.jsonl": file for name, file in exported.items()}

    def _manifest(self, files: dict[str, Exported]) -> dict[str, Any]:
        plan = self._plan
        return {
            "manifest_version": MANIFEST_VERSION,
            "tool": f"spillway {self._tool_version}",
            "created": datetime.fromtimestamp(int(time.time()), UTC).isoformat(),
            "format": plan.format,
            "filters": {
                **msgspec.structs.asdict(plan.wanted),
                "min_turns": plan.min_turns,
                "keep_failovers": plan.keep_failovers,
            },
            "split": {"shares": self._split.shares, "seed": plan.seed, "by": "beginning of the conversation"},
            "rows_read": self._read,
            "examples": sum(file.examples for file in files.values()),
            "left_out": dict(sorted(self._excluded.items())),
            "files": {name: msgspec.structs.asdict(file) for name, file in files.items()},
        }
