"""The chat page as one file with its scripts and libraries, so that it loads nothing from other hosts."""

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'"
)


@cache
def html() -> str:
    """The page, whole."""
    scripts = [*sorted((FOLDER / "libraries").glob("*.js")), FOLDER / "page.js"]
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    return page.replace(
        "<!-- scripts -->", "".join(f"<script>\n{path.read_text(encoding='utf-8')}</script>\n" for path in scripts)
    )
