"""Write the generated pages of docs/: ``make reference``."""

import sys

from scripts.reference.pages import DOCS, generated


def main() -> int:
    """Write each page that differs, and name it."""
    for name, text in generated().items():
        path = DOCS / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
