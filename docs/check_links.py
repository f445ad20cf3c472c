"""Follow every link of the built site: ``python docs/check_links.py docs/_build/html``.

Pages, anchors, images and scripts of the site itself have to exist. Links to other sites are
counted; ``sphinx-build -b linkcheck`` follows those.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name in ("href", "src"):
                self.links.append(value)
            elif value is not None and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)

    def has(self, anchor: str) -> bool:
        """Whether a link to this place of the page gets there; the empty one is its top."""
        return not anchor or anchor in self.anchors


def broken(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """A line for every link to what is not there."""
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{path.relative_to(site)}: {link} does not exist"
            elif target in pages and not pages[target].has(unquote(parts.fragment)):
                yield f"{path.relative_to(site)}: {link} has no such anchor"


def main() -> int:
    """Print what is broken; the exit code is 1 if anything is."""
    if len(sys.argv) != 2 or not (site := Path(sys.argv[1]).resolve()).is_dir():
        print(__doc__)
        return 2
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = list(broken(site, pages))
    num_links = sum(len(page.links) for page in pages.values())
    outside = {
        link for page in pages.values() for link in page.links if urlsplit(link).scheme in _WEB
    }
    print(*found, sep="\n", end="\n" if found else "")
    print(
        f"{len(pages)} pages, {num_links} links, {len(found)} broken; "
        f"{len(outside)} addresses outside of the site, not followed"
    )
    return 1 if found or not pages else 0


_WEB = ("http", "https")

if __name__ == "__main__":
    sys.exit(main())
