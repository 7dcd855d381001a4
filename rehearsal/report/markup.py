"""What the parts of the report are made of: elements, and times in words."""

from datetime import UTC, datetime, timedelta
from xml.etree.ElementTree import Element


def node(name: str, /, *children: Element | str | None, **attributes: object) -> Element:
    """Return an element; `class_` stands for class, and `text_anchor` for text-anchor. None is left out."""
    given = {
        key.rstrip("_").replace("_", "-"): str(value)
        for key, value in attributes.items()
        if value is not None
    }
    made = Element(name, given)
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif child is not None and len(made):
            made[-1].tail = (made[-1].tail or "") + child
        elif child is not None:
            made.text = (made.text or "") + child
    return made


def clock(seconds: float) -> str:
    """Return a duration as one reads it: 3.2 s, 1:02 or 1:00:02."""
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f}".removesuffix(".0") + " s"
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")


def utc(time: float) -> str:
    """Return a time of day with its date."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
