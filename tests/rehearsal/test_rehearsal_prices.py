"""Prices of a rehearsal: by hand, or by instance type from a user's file."""

import argparse

import pytest
from records import attempt, interrupted, job, points

from sagemaker_lightning.launcher import prices
from sagemaker_rehearsal import settings
from sagemaker_rehearsal.jobs.record import Record
from sagemaker_rehearsal.report import goodput_data
from sagemaker_rehearsal.report.comparison import compare
from sagemaker_rehearsal.report.page import make_sections

FILE = """instance_type,on_demand,spot,currency,date,source
ml.m5.large,72,36,EUR,2026-11-26,https://example.com
ml.g5.xlarge,1,,EUR,2026-11-26,https://example.com
ml.c5.xlarge,36,18,EUR,2026-11-27,https://example.com
ml.trn1.2xlarge,1,,USD,2026-11-26,https://example.com
"""


def settings_of(*flags: str) -> settings.Settings:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    return settings.from_flags(parser.parse_args(flags))


@pytest.fixture
def of_file(tmp_path) -> settings.Settings:
    (tmp_path / "prices.csv").write_text(FILE)
    return settings_of(f"--prices={tmp_path / 'prices.csv'}")


def test_a_job_has_the_prices_of_its_type(of_file):
    record = interrupted(2)
    found = settings.prices_for(of_file, record.instance_types)
    assert found == {"price": 72.0, "spot_price": 36.0, "currency": "EUR"}
    assert settings.describe_prices(of_file, record.instance_types) == [
        "prices of ml.m5.large: in EUR, of 2026-11-26, https://example.com"
    ]
    figures = [*make_sections(record, **found)["figures"].itertext()]
    assert "3.60 EUR" in figures and "2.40 EUR" in figures
    assert goodput_data.describe(record, **found)["cost"]["currency"] == "EUR"


def test_a_type_without_a_price_on_spot(of_file):
    found = settings.prices_for(of_file, {"ml.g5.xlarge"})
    assert (found["price"], found["spot_price"]) == (1.0, None)


def of_two_types(record: Record) -> Record:
    """Return a record whose second host is of another type."""
    for attempt_of_job in record.attempts:
        attempt_of_job.instances[1].instance_type = "ml.c5.xlarge"
    return record


def test_a_job_of_several_types_costs_what_each_of_them_costs(of_file):
    """Each host needs 90 s without interruptions, and has had 120 s."""
    record = of_two_types(interrupted(2))
    found = settings.prices_for(of_file, record.instance_types)
    assert found["price"] == {"ml.c5.xlarge": 36.0, "ml.m5.large": 72.0}
    cost = goodput_data.describe(record, **found)["cost"]
    assert cost["on_demand"] == pytest.approx(90 * (72 + 36) / 3600)
    assert cost["spot"] == pytest.approx(120 * (36 + 18) / 3600)
    assert cost["price"] == found["price"] and cost["currency"] == "EUR"
    assert settings.describe_prices(of_file, record.instance_types) == [
        "prices of ml.c5.xlarge: in EUR, of 2026-11-27, https://example.com",
        "prices of ml.m5.large: in EUR, of 2026-11-26, https://example.com",
    ]
    partly = settings.prices_for(of_file, {"ml.m5.large", "ml.g5.xlarge"})
    assert partly["price"] and partly["spot_price"] is None


def test_a_comparison_of_several_types_costs_what_each_of_them_costs(of_file):
    record = of_two_types(interrupted(2))
    other = of_two_types(job(attempt(1, 0, 100, points((50, 70)), hosts=2), modified=100.0))
    record.comparison = compare(record, other)
    found = settings.prices_for(of_file, record.instance_types)
    cells = [cell.text for cell in make_sections(record, **found)["comparison"].iter("td")]
    assert cells[-2:] == ["3.00 EUR", "1.50 EUR"]


@pytest.mark.parametrize(
    ("types", "says"),
    [
        ({"ml.p5.48xlarge"}, "no cost is said: --prices has no price of ml.p5.48xlarge"),
        (
            {"ml.m5.large", "ml.trn1.2xlarge"},
            "no cost is said: --prices has ml.m5.large in EUR, ml.trn1.2xlarge in USD",
        ),
        (
            {"ml.m5.large", "ml.p5.48xlarge"},
            "no cost is said: --prices has no price of ml.p5.48xlarge",
        ),
    ],
)
def test_where_there_is_no_price_a_note_says_so(of_file, types, says):
    nothing = {"price": None, "spot_price": None, "currency": ""}
    assert settings.prices_for(of_file, types) == nothing
    assert settings.describe_prices(of_file, types) == [says]


def test_prices_by_hand_come_before_the_file(tmp_path):
    (tmp_path / "prices.csv").write_text(FILE)
    both = settings_of(f"--prices={tmp_path / 'prices.csv'}", "--price=2", "--spot-price=1")
    found = settings.prices_for(both, {"ml.m5.large"})
    assert found == {"price": 2.0, "spot_price": 1.0, "currency": ""}
    assert settings.describe_prices(both, {"ml.m5.large"}) == []
    assert settings.describe_prices(settings_of(), {"ml.m5.large"}) == []


@pytest.mark.parametrize(("is_spot", "spot"), [(True, 2.4), (False, None)])
def test_a_job_on_demand_has_no_cost_on_spot(of_file, is_spot, spot):
    """Its report would say what spot has saved."""
    record = interrupted(2)
    prices = settings.prices_of_job(of_file, record.instance_types, is_spot)
    cost = goodput_data.describe(record, **prices)["cost"]
    assert (cost["on_demand"], cost["spot"]) == (3.6, spot and pytest.approx(spot))
    figures = " ".join(make_sections(record, **prices)["figures"].itertext())
    assert ("cost on spot" in figures) is is_spot


def test_a_job_without_an_instance_has_no_price(of_file):
    assert job(status="Stopped").instance_types == set()
    assert settings.prices_for(of_file, set())["price"] is None
    assert job(attempt(1, 0, 9, [])).instance_types == {"ml.m5.large"}


def test_without_a_file_the_prices_of_the_package_are_used_and_their_date_is_said():
    own = settings_of()
    listed = prices.read(prices.OWN)["ml.g4dn.xlarge"]
    found = settings.prices_for(own, {"ml.g4dn.xlarge"})
    assert found == {"price": listed.on_demand, "spot_price": None, "currency": "USD"}
    assert settings.describe_prices(own, {"ml.g4dn.xlarge"}) == [
        f"prices of ml.g4dn.xlarge: in USD, of {listed.origin}",
        prices.CAUTION,
    ]
    # Nobody has asked for a price that it does not have.
    assert settings.describe_prices(own, {"ml.g4dn.xlarge", "ml.p5.48xlarge"}) == []
    assert settings.prices_for(own, {"ml.g4dn.xlarge", "ml.p5.48xlarge"})["price"] is None


def test_a_file_that_is_wrong_is_named():
    with pytest.raises(ValueError, match="--prices: none.csv cannot be read"):
        settings_of("--prices=none.csv")
