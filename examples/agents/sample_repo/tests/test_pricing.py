"""Tests of shelf.pricing; a test returns what it got and what it expected."""

from shelf.pricing import line_total, with_tax


def test_single_pieces_have_no_discount() -> tuple[int, int]:
    """Nine pieces cost nine times the price."""
    return line_total(200, 9), 1800


def test_a_full_box_has_a_discount() -> tuple[int, int]:
    """Ten pieces are a full box: 15 percent less."""
    return line_total(200, 10), 1700


def test_tax_is_rounded_up() -> tuple[int, int]:
    """Half a cent of tax becomes a whole one."""
    return with_tax(1002, 25), 1253
