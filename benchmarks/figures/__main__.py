"""`make figures`: write the pages."""

from benchmarks.figures import pages


def main() -> None:
    for marked in (pages.README, pages.PLAN):
        marked.write_text(pages.filled(marked.read_text(encoding="utf-8")), encoding="utf-8")
    pages.PAGE.write_text(pages.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
