"""MyST Markdown as plain Markdown, for readers who open a notebook outside the book.

Directives and roles become text that Colab and JupyterLab show well; nothing of the book's own
syntax is left over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

STATEMENTS = (
    "theorem proposition lemma definition corollary conjecture assumption axiom criterion "
    "remark example property observation algorithm"
).split()
BOXES = (
    "note tip warning important caution attention danger error hint seealso admonition margin "
    "sidebar card topic"
).split()
DROPPED = {"toctree", "tableofcontents", "contents", "raw", "index", "include", "bibliography"}
UNWRAPPED = {"grid", "grid-item", "tab-set", "div", "container", "rst-class"}

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|:{3,})\{(?P<name>[^}]+)\}[ \t]*(?P<arg>.*)$")
OPTION = re.compile(r"^ *:(?P<key>[\w-]+):[ \t]*(?P<value>.*)$")
TARGET = re.compile(r"^ *\((?P<label>[\w.:-]+)\)= *$")
ROLE = re.compile(r"\{(?P<name>[a-z][\w:+.-]*)\}(?P<ticks>`+)(?P<text>.+?)(?P=ticks)(?!`)", re.S)
TITLED = re.compile(r"^(?P<title>.+?)\s*<(?P<target>[^<>]+)>$", re.S)
PAGE_LINK = re.compile(r"(?<!!)\[(?P<shown>[^\]]*)\]\((?!\w+:)[^)#\s]*(?:#(?P<label>[^)\s]+))?\)")
MATH_LABEL = re.compile(r"(?m)^(\s*\$\$)[ \t]*\((?P<label>[\w.:-]+)\)[ \t]*$")


@dataclass
class Directive:
    """One fenced directive, taken apart."""

    name: str
    argument: str
    options: dict[str, str]
    body: list[str]


@dataclass
class Context:
    """What references point to: shown text by label, citations by key, values by name."""

    labels: dict[str, str] = field(default_factory=dict)
    cite: Callable[[str, str], str] = lambda role, keys: keys
    pages: dict[str, str] = field(default_factory=dict)


def parse_directive(lines: list[str], start: int) -> tuple[Directive, int] | None:
    """The directive that opens at `lines[start]` and the index after it."""
    opening = FENCE.match(lines[start])
    if not opening:
        return None
    fence, indent = opening["fence"], len(opening["indent"])
    closing = re.compile(rf"^ *{re.escape(fence[0])}{{{len(fence)},}} *$")
    end = next((i for i in range(start + 1, len(lines)) if closing.match(lines[i])), len(lines))
    inner = [line[indent:] if line[:indent].isspace() else line for line in lines[start + 1 : end]]
    options, rest = split_options(inner)
    return Directive(opening["name"], opening["arg"].strip(), options, rest), end + 1


def split_options(lines: list[str]) -> tuple[dict[str, str], list[str]]:
    """`:key: value` lines or a `---` block at the head of a directive's body."""
    options, i = {}, 0
    if lines and lines[0].strip() == "---":
        end = next((k for k in range(1, len(lines)) if lines[k].strip() == "---"), 0)
        for line in lines[1:end]:
            key, _, value = line.partition(":")
            options[key.strip()] = value.strip()
        return options, lines[end + 1 :]
    while i < len(lines) and (match := OPTION.match(lines[i])):
        options[match["key"]] = match["value"].strip()
        i += 1
    return options, lines[i:]


def directives(text: str) -> Iterable[Directive]:
    """All directives of a text, nested ones included."""
    lines, i = text.splitlines(), 0
    while i < len(lines):
        found = parse_directive(lines, i)
        if found:
            yield found[0]
            yield from directives("\n".join(found[0].body))
            i = found[1]
        else:
            i += 1


def short_label(label: str) -> str:
    """`clustering-T1` is T1 to a reader; a label in words stands in brackets."""
    tail = label.rsplit("-", 1)[-1]
    return tail if re.fullmatch(r"[A-Z]+\d+\w?", tail) else f"({tail})" if tail else ""


def defined_labels(text: str) -> dict[str, str]:
    """Labels that a text defines, each with the words that a reference to it shows."""
    found = {}
    for item in directives(text):
        label = item.options.get("label") or item.options.get("name")
        if label:
            kind = item.name.removeprefix("prf:")
            known = {"math": "equation", "figure": "Figure", "image": "Figure"}
            word = known.get(kind, kind.capitalize() if kind in STATEMENTS else "")
            found[label] = f"{word} {short_label(label)}".strip()
    for match in MATH_LABEL.finditer(text):
        found[match["label"]] = f"equation {short_label(match['label'])}"
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if match := TARGET.match(line):
            heading = next((x for x in lines[i + 1 : i + 4] if x.startswith("#")), "")
            found[match["label"]] = heading.lstrip("# ") or match["label"]
    return found


def plain(text: str, context: Context) -> str:
    """The text without directives, roles, targets and comments."""
    return "\n".join(_blocks(text.splitlines(), context)).strip("\n")


def _blocks(lines: list[str], context: Context) -> list[str]:
    out, prose, i = [], [], 0

    def flush() -> None:
        out.extend(_inline("\n".join(prose), context).split("\n") if prose else [])
        prose.clear()

    while i < len(lines):
        found = parse_directive(lines, i)
        code = re.match(r"^ *(`{3,}|~{3,})", lines[i])
        if found:
            flush()
            out.extend(["", *_directive(found[0], context), ""])
            i = found[1]
        elif code:
            flush()
            end = _end_of_code(lines, i, code[1])
            out.extend(lines[i:end])
            i = end
        else:
            if not TARGET.match(lines[i]) and not lines[i].startswith("% "):
                prose.append(lines[i])
            i += 1
    flush()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).split("\n")


def _end_of_code(lines: list[str], start: int, fence: str) -> int:
    for i in range(start + 1, len(lines)):
        if lines[i].strip().startswith(fence) and set(lines[i].strip()) == {fence[0]}:
            return i + 1
    return len(lines)


def _quoted(lines: list[str]) -> list[str]:
    return [f"> {line}".rstrip() for line in lines]


def _trimmed(lines: list[str]) -> list[str]:
    return "\n".join(lines).strip("\n").split("\n")


def _directive(item: Directive, context: Context) -> list[str]:
    kind = item.name.removeprefix("prf:")
    title = _inline(item.argument, context)
    if item.name in DROPPED:
        return []
    if kind in ("math", "code", "code-block", "figure", "image", "table", "list-table", "div"):
        return _literal(kind, item, title, context)
    body = _trimmed(_blocks(item.body, context))
    if kind == "proof":
        return ["*Proof.*", "", *body, "", "∎"]
    if item.name.startswith("prf:"):
        label = item.options.get("label", "")
        short = short_label(label)
        name = f"{kind.capitalize()} {short}".strip()
        bare = title.replace("**", "").removeprefix(f"{short} · ")
        return _quoted([f"**{name}{f' ({bare})' if bare else ''}.**", "", *body])
    if kind in ("dropdown", "solution", "tab-item"):
        return ["<details>", f"<summary>{title}</summary>", "", *body, "", "</details>"]
    if kind in BOXES:
        own = kind in ("admonition", "margin", "sidebar", "card", "topic")
        if kind in ("note", "tip", "warning", "important") and title:
            body, title = [title, *body], ""
        head = title or ("" if own else kind.replace("seealso", "see also").capitalize())
        return _quoted([*([f"**{head}**", ""] if head else []), *body])
    return body if item.name in UNWRAPPED or not title else [f"**{title}**", "", *body]


def _literal(kind: str, item: Directive, title: str, context: Context) -> list[str]:
    """Directives whose body is not a paragraph of text."""
    body = _trimmed(item.body)
    if kind == "math":
        return ["$$", *([item.argument] if item.argument else []), *body, "$$"]
    if kind in ("code", "code-block"):
        return [f"```{item.argument}", *body, "```"]
    if kind in ("figure", "image"):
        picture = f"![{item.options.get('alt', '')}]({item.argument})"
        return [picture, "", *_blocks(body, context)]
    head = [f"**{title}**", ""] if title else []
    if kind == "list-table":
        return head + _rows(body, context)
    return head + _trimmed(_blocks(body, context))


def _rows(lines: list[str], context: Context) -> list[str]:
    """A list-table as a pipe table."""
    rows: list[list[str]] = []
    for line in lines:
        if match := re.match(r"^\s*\*\s+-\s?(.*)$", line):
            rows.append([match[1]])
        elif rows and (match := re.match(r"^\s+-\s?(.*)$", line)):
            rows[-1].append(match[1])
        elif rows and line.strip():
            rows[-1][-1] += " " + line.strip()
    cells = [[_inline(c, context).replace("|", "\\|") for c in row] for row in rows]
    table = [f"| {' | '.join(row)} |" for row in cells]
    return [table[0], "|" + " --- |" * len(cells[0]), *table[1:]] if table else []


def _inline(text: str, context: Context) -> str:
    text = MATH_LABEL.sub(r"\1", text)
    text = PAGE_LINK.sub(lambda m: m["shown"] or context.labels.get(m["label"], ""), text)
    return ROLE.sub(lambda match: _role(match["name"], match["text"], context), text)


def _role(name: str, text: str, context: Context) -> str:
    text = " ".join(text.split())
    titled = TITLED.match(text)
    shown, target = (titled["title"], titled["target"]) if titled else ("", text)
    if name.startswith("cite"):
        return context.cite(name, target if not titled else text)
    if name == "math":
        return f"${text}$"
    if name == "eq":
        shown = context.labels.get(target, f"({target})").removeprefix("equation ")
        return shown if shown.startswith("(") else f"({shown})"
    if name in ("ref", "prf:ref", "numref", "doc", "download"):
        known = context.labels.get(target) or context.pages.get(target.rsplit("/", 1)[-1])
        known = known or target
        if name == "numref" and any(mark in shown for mark in ("%s", "{number}")):
            return known
        return shown or known
    if name in ("sub", "sup"):
        return f"<{name}>{text}</{name}>"
    if name in ("kbd", "code", "file", "command"):
        return f"`{text}`"
    if name == "abbr":
        return text.split(" (")[0]
    return f"**{shown or text}**" if name.startswith("bdg") else shown or text
