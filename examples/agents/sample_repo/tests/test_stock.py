"""Tests of shelf.stock; a test returns what it got and what it expected."""

from shelf.stock import Stock


def test_pieces_add_up() -> tuple[int, int]:
    """Two deliveries of one article lie together."""
    stock = Stock()
    stock.add("cup", 3)
    return stock.add("cup", 4), 7


def test_the_last_piece_can_be_taken() -> tuple[int, int]:
    """Taking all pieces leaves none."""
    stock = Stock()
    stock.add("cup", 3)
    return stock.take("cup", 3), 0
