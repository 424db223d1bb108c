"""Write the generated pages: python -m tests.reference."""

import sys

from tests.reference import errors, log_messages


def main() -> int:
    """Write all pages."""
    for page in (errors, log_messages):
        page.DOCUMENT.write_text(page.document())
        print(page.DOCUMENT)  # noqa: T201  # a command
    return 0


if __name__ == "__main__":
    sys.exit(main())
