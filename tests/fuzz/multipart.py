"""Forms of POST /v1/files: a first line with the content type, then the body."""

from gateway.batches.upload import MAX_FIELD_BYTES, MAX_NAME_CHARS, Upload, receive_upload
from gateway.errors import Refused
from tests.fuzz.driving import cut_bytes, driven, pieces
from tests.fuzz.mutations import Form

FORM: Form = "bytes"
MAX_BYTES = 1000

_TYPE = b"multipart/form-data; boundary=b\n"
_FIELD = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
_FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: x/y\r\n\r\n{}\r\n'
_END = b"--b--\r\n"
SEEDS = [
    _TYPE + _FIELD + _FILE + _END,
    _TYPE + _FILE + _FIELD * 3 + _END + b"epilogue",
    _TYPE + b"preamble\r\n" + _FILE.replace(b"{}", b"x\r\n--" * 60) + _END,
    _TYPE + _FILE.replace(b'filename="a.jsonl"', b"filename*=utf-8''a%00%ff.jsonl") + _END,
    b'multipart/form-data; charset="utf-8"; boundary="b"\n' + _FIELD.replace(b"purpose", b"\xff") + _FILE + _END,
]


class _Written:
    def __init__(self) -> None:
        self.data = b""

    async def write(self, data: bytes) -> None:
        self.data += data


def run(payload: bytes) -> None:
    content_type, _, body = payload.partition(b"\n")
    whole = driven(_received(content_type.decode("latin-1"), body, len(body) or 1))
    assert whole == driven(_received(content_type.decode("latin-1"), body, cut_bytes(body))), "it depends on the cut"
    if whole is None:
        return
    upload, data = whole
    assert len(data) == upload.size_bytes <= MAX_BYTES
    assert len(upload.filename or "") <= MAX_NAME_CHARS
    for name, value in upload.fields.items():
        assert len(value) <= MAX_FIELD_BYTES
        name.encode(), value.encode()


async def _received(content_type: str, body: bytes, piece_bytes: int) -> tuple[Upload, bytes] | None:
    """Return an upload and its file; None: it was refused."""
    writer = _Written()
    try:
        upload = await receive_upload(pieces(body, piece_bytes), content_type, writer, max_bytes=MAX_BYTES)
    except Refused:
        return None
    return upload, writer.data
