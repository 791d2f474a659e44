"""`make figures`: write the pages."""

from benchmarks.figures.pages import PAGES, PICTURE, drawn, filled, unshown


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(drawn(), encoding="utf-8")
    if missing := unshown():
        raise SystemExit(f"No page shows the figures {', '.join(sorted(missing))}: give each a place, <!-- figures: NAME -->")


if __name__ == "__main__":
    main()
