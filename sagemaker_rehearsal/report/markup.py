"""Building blocks of the report: elements, and times as text."""

from datetime import UTC, datetime, timedelta
from xml.etree.ElementTree import Element

from sagemaker_lightning.contract.errors import printable


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


def clock(seconds: float) -> str:
    """Return a duration as text: 3.2 s, 1:02 or 1:00:02."""
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f}".removesuffix(".0") + " s"
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")


def utc(time: float) -> str:
    """Return a time as date and time of day, in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
