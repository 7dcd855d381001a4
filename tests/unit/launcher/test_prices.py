"""Prices of instance hours, from a user's file."""

import json
from datetime import date

import pytest

from sagemaker_lightning.launcher import prices

HEADER = "instance_type,on_demand,spot,currency,date,source"
# Made up.
ROW = "ml.g5.xlarge,1.5,0.5,USD,2026-11-26,https://example.com/prices"


def written(tmp_path, text: str, name: str = "prices.csv") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_prices_come_from_csv(tmp_path):
    path = written(tmp_path, f"\ufeff{HEADER}\n{ROW}\nml.p5.48xlarge,9,,USD,2026-01-02,a\n")
    day = date(2026, 11, 26)
    assert prices.read(path) == {
        "ml.g5.xlarge": prices.Price(1.5, 0.5, "USD", day, "https://example.com/prices"),
        "ml.p5.48xlarge": prices.Price(9.0, None, "USD", date(2026, 1, 2), "a"),
    }


def test_a_column_that_is_not_needed_may_be_left_out(tmp_path):
    path = written(tmp_path, "date,source,currency,instance_type,on_demand\n2026-01-02,a,EUR,x,0\n")
    assert prices.read(path)["x"] == prices.Price(0.0, None, "EUR", date(2026, 1, 2), "a")


def test_a_price_says_when_and_where_it_was_so(tmp_path):
    path = written(tmp_path, f"{HEADER},region\n{ROW},eu-west-1\n")
    origin = "2026-11-26, eu-west-1, https://example.com/prices"
    assert prices.read(path)["ml.g5.xlarge"].origin == origin


def test_each_price_of_the_package_has_its_source():
    """It is read by the same rules as anybody's, and it is as sure as its sources."""
    listed = prices.read(prices.OWN)
    assert len(listed) >= 12 and "ml.g5.xlarge" in listed
    for price in listed.values():
        assert price.currency == "USD" and price.region and price.on_demand > 0
        assert price.source.startswith("https://") and price.day < date(2026, 11, 28)


def test_prices_come_from_json(tmp_path):
    entry = dict(zip(HEADER.split(","), ROW.split(","), strict=True))
    entries = [entry | {"on_demand": 1.5, "spot": None}]
    found = prices.read(written(tmp_path, json.dumps(entries), "prices.json"))
    assert found["ml.g5.xlarge"].on_demand == 1.5 and found["ml.g5.xlarge"].spot is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{HEADER}\n{ROW}\n{ROW}\n", "entry 2 of .*: found ml.g5.xlarge twice"),
        (f"{HEADER}\n{ROW},more\n", "cannot be read: found a line with more values"),
        (f"{HEADER}\nx,1,,USD,2026-11-26\n", "found no source, expected instance_type, on_demand"),
        (f"{HEADER}\nx,,,USD,2026-11-26,a\n", "found no on_demand"),
        (f"{HEADER}\nx,1,,USD,soon,a\n", "found date 'soon', expected the day of the price"),
        (f"{HEADER}\nx,-1,,USD,2026-11-26,a\n", "found on_demand '-1', expected a number, 0"),
        (f"{HEADER}\nx,1,nan,USD,2026-11-26,a\n", "found spot 'nan', expected a number, 0"),
        (f"{HEADER}\nx,1,inf,USD,2026-11-26,a\n", "found spot 'inf'"),
        ("type,price\nx,1\n", "found 'price', expected instance_type, .*spot .if known."),
        (f'{HEADER}\n"x', "cannot be read: unexpected end of data"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, text, says):
    with pytest.raises(ValueError, match=f"^--prices: .*{says}") as caught:
        prices.read(written(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "found no list of objects"),
        ("[1]", "found no list of objects"),
        ("[", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('[{"instance_type": ["x"], "on_demand": 1, "currency": "USD", "date": "2026-11-26", '
         '"source": "a"}]', "found instance_type .'x'., expected text"),
        ('[{"instance_type": "x", "on_demand": 1, "currency": "USD", "date": "2026-11-26", '
         '"source": "a", "region": 1}]', "found region 1, expected text"),
        ('[{"instance_type": "x", "on_demand": true, "currency": "USD", "date": "2026-11-26", '
         '"source": "a"}]', "found on_demand True"),
        ('[{"instance_type": "x", "on_demand": 1, "currency": "USD", "date": 5, "source": "a"}]',
         "found date 5"),
    ],
)  # fmt: skip
def test_json_that_is_wrong(tmp_path, text, says):
    with pytest.raises(ValueError, match=f"^--prices: .*{says}"):
        prices.read(written(tmp_path, text, "prices.json"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: .*No such file"):
        prices.read(str(tmp_path / "none.csv"))
