"""Reads prices of instance hours: from a user's file, or from the list of this package.

A file is CSV with the columns of COLUMNS, or JSON, a list of objects with these keys.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

COLUMNS = ("instance_type", "on_demand", "spot", "currency", "region", "date", "source")
# Those of COLUMNS that may be left out or empty.
OPTIONAL = ("spot", "region")
# Used without --prices, where it has all types of a job. SageMaker's spot prices are not published.
OWN = str(Path(__file__).with_name("prices.csv"))
CAUTION = "prices change, and regions differ: --prices=FILE has yours"


@dataclass(frozen=True)
class Price:
    """The price of an instance hour of one type.

    Attributes:
        on_demand: On demand.
        spot: On spot; None where it is not known.
        currency: The currency of both, e.g. USD.
        day: When they were so.
        source: Who says so, e.g. an address.
        region: Where they were so; "" where it is not known.
    """

    on_demand: float
    spot: float | None
    currency: str
    day: date
    source: str
    region: str = ""

    @property
    def origin(self) -> str:
        """When and where the price was so, and who says so."""
        return ", ".join(filter(None, (str(self.day), self.region, self.source)))


def read(path: str) -> dict[str, Price]:
    """Return the prices in a file, by instance type.

    Raises ValueError that names the file, and what is wrong in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        rows = json.loads(text) if Path(path).suffix == ".json" else _csv_rows(text)
    # RecursionError: the JSON is nested too deeply.
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise ValueError(f"--prices: {path} cannot be read: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"--prices: found no list of objects in {path}, expected JSON of one")
    prices: dict[str, Price] = {}
    for number, row in enumerate(rows, start=1):
        where = f"--prices: entry {number} of {path}"
        name, price = _price(where, row)
        if name in prices:
            raise ValueError(f"{where}: found {name} twice, expected once")
        prices[name] = price
    return prices


def _csv_rows(text: str) -> list[dict[str, str]]:
    rows = list(csv.DictReader(text.splitlines(), strict=True))
    # What is beyond the header's columns has the key None.
    if any(None in row for row in rows):
        raise ValueError("found a line with more values than the first line has names")
    return rows


def _price(where: str, row: Mapping[str, Any]) -> tuple[str, Price]:
    """Return an entry's instance type and price; ValueError begins with `where`."""
    given = {name: value for name, value in row.items() if value not in ("", None)}
    if unknown := sorted(given.keys() - set(COLUMNS)):
        raise ValueError(f"{where}: found {unknown[0]!r}, expected {_listed(COLUMNS)}")
    if missing := [name for name in COLUMNS if name not in given and name not in OPTIONAL]:
        raise ValueError(f"{where}: found no {missing[0]}, expected {_listed(COLUMNS)}")
    for name in ("instance_type", "currency", "source", "region"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError(f"{where}: found {name} {given[name]!r}, expected text")
    try:
        day = date.fromisoformat(given["date"])
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}: found date {given['date']!r}, expected the day of the price, as 2026-11-26"
        ) from None
    amounts = {name: _amount(where, name, given[name]) for name in COLUMNS[1:3] if name in given}
    price = Price(
        amounts["on_demand"],
        amounts.get("spot"),
        given["currency"],
        day,
        given["source"],
        given.get("region", ""),
    )
    return given["instance_type"], price


def _amount(where: str, name: str, value: object) -> float:
    """Return a price as a number, 0 or more."""
    number = math.nan
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{where}: found {name} {value!r}, expected a number, 0 or more")
    return number


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"{name} (if known)" if name in OPTIONAL else name for name in names)
