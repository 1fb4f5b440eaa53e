import xml.etree.ElementTree as ET

import pytest

from server_ext.analysis.svg import Axis, bars, heat_map, lines, stacked_bars, write_time, write_value


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.123, "%", "12 %"),
        (1234, "tokens", "1.23k"),
        (8e9, "B", "8 GB"),
        (12, "B", "12 B"),
        (2.5e-5, "s", "25 µs"),
        (0.35, "s", "350 ms"),
        (90, "s", "90 s"),
        (600, "s", "10 min"),
        (7200, "s", "2 h"),
    ],
)
def test_values_are_written_as_people_do(value, unit, text):
    """A value has the unit that suits its size."""
    assert write_value(value, unit) == text
    if unit == "s":
        assert write_time(value) == text


@pytest.mark.parametrize("is_log", [True, False])
@pytest.mark.parametrize(
    "points",
    [[(1, 1)], [(0, 0), (0, 1)], [(1e-6, 5), (1e9, 5)], [(3, 0.1), (3, 0.1)], []],
)
def test_any_points_make_a_chart(points, is_log):
    """One point, zeros on a logarithmic axis, a flat line, or nothing at all: what is drawn is well-formed."""
    chart = lines({"a & b": points}, Axis("x", is_log=is_log), Axis("y", is_log=is_log), marks={"here": 2.0})
    assert ET.fromstring(chart).tag == "svg"
    assert "nan" not in chart


def test_bars_and_maps_are_well_formed():
    """Labels are escaped, zeros drawn, and the chosen cell is framed."""
    assert ET.fromstring(bars([("<a>", 0.0, "none"), ("b", 5.0, "5")])) is not None
    heat = heat_map(["1", "2"], ["x"], [[0.0, 1.0]], ("c", "r"), unit="%", chosen=(0, 1))
    assert heat.count("chosen") == 1
    assert ET.fromstring(heat) is not None
    stacked = stacked_bars(["1"], {"old": [0.0], "new": [0.0]}, "turn", Axis("tokens"))
    assert stacked.count("mark fill") == 2
