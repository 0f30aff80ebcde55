"""What a built site links to and does not have: `python docs/_ext/links.py build/docs/html`. Nothing is fetched.

It follows every relative link, anchor, image, script and style sheet, wants an alt text for each picture, and
weighs the first page with all that a browser loads for it.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SOURCES = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src", "iframe": "src"}
MOST = 300 * 1024  # bytes of the first page


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors, self.pictures = [], [], {""}, []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.update(found[name] for name in ("id", "name") if found.get(name))
        if found.get(SOURCES.get(tag)):
            self.links.append((tag, found[SOURCES[tag]]))
            if tag != "a" and found.get("rel") not in ("index", "search", "next", "prev", "author"):
                self.loads.append(found[SOURCES[tag]])
        if tag == "img":
            self.pictures.append((found.get("src", ""), found.get("alt")))
        if tag == "svg" and found.get("role") == "img":
            self.pictures.append(("svg", found.get("aria-label")))


def target(page, link):
    """The file and the anchor that a link of a page leads to, or None where it leads out of the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    return file / "index.html" if file.is_dir() else file, unquote(parts.fragment)


def faults(site):
    """A line for each fault of the site."""
    pages = {
        path: Page(path) for path in sorted(site.resolve().rglob("*.html")) if "_static" not in path.parts
    }
    if not pages:
        yield f"{site}: expected a built site, found no pages. Run `make docs`."
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for tag, link in page.links:
            found = target(path, link)
            if found is None:
                continue
            file, anchor = found
            if not file.exists():
                yield f"{name}: <{tag}> leads to {link}, which is not there"
            elif file in pages and anchor not in pages[file].anchors:
                yield f"{name}: <{tag}> leads to {link}, a page without that anchor"
        for picture, alt in page.pictures:
            if alt is None or (not alt and "_thumb." not in picture):  # thumbnails stand beside their titles
                yield f"{name}: {picture} has no alt text"


def weight(page):
    """Bytes of a page with its styles, scripts and pictures."""
    page = page.resolve()
    loaded = {page}
    for link in Page(page).loads:
        found = target(page, link)
        if found is not None and found[0].is_file():
            loaded.add(found[0])
    return sum(file.stat().st_size for file in loaded)


def main(site):
    found = list(faults(site))
    first = site / "index.html"
    if first.exists() and (heavy := weight(first)) > MOST:
        found.append(f"index.html: expected at most {MOST:,} bytes with all that it loads, got {heavy:,}")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
