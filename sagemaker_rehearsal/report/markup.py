"""Building blocks of the report and the page: elements, tables, and times as text."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from xml.etree.ElementTree import Element, tostring

from sagemaker_lightning.contract.errors import printable

# The class of a column with text; the other columns have numbers.
TEXT_CLASS = "words"


def node(name: str, /, *children: Element | str | None, **attributes: object) -> Element:
    """Return an element; children and attributes that are None are left out.

    `class_` stands for the attribute class, and `text_anchor` for text-anchor. Texts get escapes in
    place of control characters, which HTML does not have and a browser or terminal may obey.
    """
    text_attributes = {
        key.rstrip("_").replace("_", "-"): printable(str(value))
        for key, value in attributes.items()
        if value is not None
    }
    element = Element(name, text_attributes)
    for child in children:
        if isinstance(child, Element):
            element.append(child)
        elif child is not None and len(element):
            element[-1].tail = (element[-1].tail or "") + printable(child, kept="\n")
        elif child is not None:
            element.text = (element.text or "") + printable(child, kept="\n")
    return element


def make_table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Element | str]],
    *,
    words: Iterable[str],
) -> list[Element]:
    """Return a table that scrolls if it is too large; nothing without rows.

    `words` are the names of the columns with text.
    """
    if not rows:
        return []
    classes = [TEXT_CLASS if name in words else "number" for name in columns]
    head = node(
        "tr",
        *(
            node("th", name, scope="col", class_=class_name)
            for name, class_name in zip(columns, classes, strict=True)
        ),
    )
    body = [
        node(
            "tr",
            *(
                node("td", cell, class_=class_name)
                for cell, class_name in zip(row, classes, strict=True)
            ),
        )
        for row in rows
    ]
    table = node(
        "table", node("caption", node("span", caption)), node("thead", head), node("tbody", *body)
    )
    return [node("div", table, class_="table", tabindex=0, role="region", aria_label=caption)]


def html(element: Element) -> str:
    """Return an element as text."""
    return tostring(element, encoding="unicode", method="html")


def document(title: str, body: Element, style: str, *more: Element) -> str:
    """Return a whole page of HTML; `more` comes at the end of its head."""
    head = node("head", node("meta", charset="utf-8"), node("title", title))
    head.append(node("meta", name="viewport", content="width=device-width, initial-scale=1"))
    head.append(node("style", style))
    head.extend(more)
    return f"<!doctype html>\n{html(node('html', head, body, lang='en'))}\n"


def clock(seconds: float) -> str:
    """Return a duration as text: 3.2 s, 1:02 or 1:00:02."""
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f}".removesuffix(".0") + " s"
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")


def utc(time: float) -> str:
    """Return a time as date and time of day, in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
