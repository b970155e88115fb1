"""Look at every built page the way a reader meets it, and say what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from bs4 import BeautifulSoup, Tag

OUTSIDE = re.compile(r"^(?:https?:)?//", re.I)
CSS_LOADS = re.compile(r"(?:url\(\s*|@import\s+)[\"']?\s*((?:https?:)?//[^\"')\s]+)", re.I)
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
LOADS |= {"audio": "src", "embed": "src", "object": "data", "link": "href"}
FETCHED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch"}
FETCHED_LINKS |= {"modulepreload", "manifest", "shortcut", "apple-touch-icon"}

NOISE = {
    "a traceback": re.compile(r"Traceback \(most recent call last\)"),
    "a warning": re.compile(r"\b[A-Z]\w*Warning: \S"),
    "progress-bar garbage": re.compile(r"\r(?!\n)|\d+%\|[█▏▎▍▌▋▊▉ #]|\d(?:it/s|s/it)\]"),
    "an object's repr": re.compile(r"\bat 0x[0-9a-fA-F]{6,}"),
    "terminal colour codes": re.compile(r"\x1b\["),
}
RAW = {
    "a raw directive": re.compile(r"(?:`{3,}|:{3,})\{[\w:-]+\}|^\s*:{3,}\s*$", re.M),
    "a raw role": re.compile(r"\{[a-z][\w:+-]*\}`"),
    "a bare dollar sign": re.compile(r"\$"),
}
LAUNCHERS = ("colab.", "mybinder.", "binder")


def crawl(site: Path, launch: Path | None = None, branch: str = "") -> list[str]:
    """All faults of a built site, one line each with page and excerpt."""
    pages = {path: Page(site, path) for path in sorted(site.rglob("*.html")) if own(site, path)}
    problems = []
    for page in pages.values():
        problems += [f"{page.name}: {text}" for text in page.faults(pages, launch, branch)]
    return problems + list(style_faults(site))


def own(site: Path, path: Path) -> bool:
    """Pages of the book, not the parts of packages that it carries along."""
    return path.relative_to(site).parts[0] not in ("_static", "_sources")


def style_faults(site: Path) -> Iterator[str]:
    for path in sorted(site.rglob("*.css")):
        for address in CSS_LOADS.findall(path.read_text(encoding="utf-8", errors="replace")):
            yield f"{path.relative_to(site)}: loads from outside: {address}"


def excerpt(text: str, place: int) -> str:
    return " ".join(text[max(0, place - 30) : place + 60].split())


class Page:
    """One built page."""

    def __init__(self, site: Path, path: Path):
        self.site, self.path = site, path
        self.name = path.relative_to(site).as_posix()

    @cached_property
    def soup(self) -> BeautifulSoup:
        data = self.path.read_bytes().decode("utf-8")
        return BeautifulSoup(data, "html.parser")

    @cached_property
    def anchors(self) -> set[str]:
        named = {tag["id"] for tag in self.soup.find_all(id=True)}
        return named | {tag["name"] for tag in self.soup.find_all("a", attrs={"name": True})}

    def faults(self, pages: dict[Path, Page], launch: Path | None, branch: str) -> Iterator[str]:
        yield from self.outside()
        yield from self.links(pages)
        yield from self.images()
        yield from self.launches(launch, branch)
        yield from self.noise()

    def outside(self) -> Iterator[str]:
        """Nothing that a browser fetches by itself may come from elsewhere."""
        for tag in self.soup.find_all(list(LOADS)):
            if tag.name == "link" and not FETCHED_LINKS & set(tag.get("rel") or []):
                continue
            address = tag.get(LOADS[tag.name]) or ""
            if OUTSIDE.match(address):
                yield f"loads a {tag.name} from outside: {address}"
        for tag in self.soup.find_all(style=True):
            yield from (f"loads from outside: {a}" for a in CSS_LOADS.findall(tag["style"]))
        for tag in self.soup.find_all("style"):
            yield from (f"loads from outside: {a}" for a in CSS_LOADS.findall(tag.get_text()))

    def links(self, pages: dict[Path, Page]) -> Iterator[str]:
        for tag in self.soup.find_all(["a", "link", "img", "script", "source"]):
            address = tag.get("href") or tag.get("src")
            if not address or urlsplit(address).scheme or OUTSIDE.match(address):
                continue
            parts = urlsplit(address)
            target = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path
            if target.is_dir():
                target = target / "index.html"
            if not target.is_file():
                yield f"dead link: {address}"
            elif tag.name == "a" and self.lost(parts.fragment, pages.get(target)):
                yield f"dead link: no place '{parts.fragment}' in {pages[target].name}"

    @staticmethod
    def lost(fragment: str, page: Page | None) -> bool:
        return bool(fragment and page) and unquote(fragment) not in page.anchors

    def images(self) -> Iterator[str]:
        """Sphinx writes the file's address where an author gave no alternative text."""
        for tag in self.soup.find_all("img"):
            alt, file = (tag.get("alt") or "").strip(), Path(tag.get("src") or "").name
            if not alt or alt.endswith(file):
                yield f"image without alternative text: {file or 'inline image'}"

    def launches(self, launch: Path | None, branch: str) -> Iterator[str]:
        """A launch button must open a file of the tree that is published with the book."""
        for tag in self.soup.find_all("a", href=True):
            parts = urlsplit(tag["href"])
            if not parts.netloc.startswith(LAUNCHERS):
                continue
            inside = parse_qs(parts.query).get("urlpath", [""])[0].partition("tree/")[2]
            inside = inside or parts.path.partition(f"/blob/{branch}/")[2]
            if not inside or launch is None or not (launch / inside).is_file():
                yield f"launch link without a target in the published tree: {tag['href']}"

    def noise(self) -> Iterator[str]:
        if self.soup.select(".system-message, .problematic"):
            yield "a message of the page builder stands in the page"
        for tag in self.soup.select(".output.traceback, .output_error"):
            yield f"a traceback: {excerpt(tag.get_text(), 0)}"
        body = self.soup.find("main") or self.soup.body or self.soup
        yield from search(NOISE, text_of(body, skip=lambda tag: is_code_input(tag)))
        yield from search(RAW, text_of(body, skip=is_verbatim))


def search(patterns: dict[str, re.Pattern], text: str) -> Iterator[str]:
    for what, pattern in patterns.items():
        if match := pattern.search(text):
            yield f"{what}: {excerpt(text, match.start())!r}"


def is_code_input(tag: Tag) -> bool:
    return tag.name in ("script", "style") or "cell_input" in tag.get("class", [])


def is_verbatim(tag: Tag) -> bool:
    """Where a reader expects to see markup as it is typed."""
    classes = set(tag.get("class", []))
    return tag.name in ("script", "style", "pre", "code") or bool(
        classes & {"math", "cell_input", "highlight"}
    )


def text_of(tag: Tag, skip) -> str:
    """Text of a part of the page, without what `skip` leaves out."""
    parts = []
    for child in tag.children:
        if isinstance(child, Tag):
            if not skip(child):
                parts.append(text_of(child, skip))
        elif type(child).__name__ == "NavigableString":
            parts.append(str(child))
    return "".join(parts)
