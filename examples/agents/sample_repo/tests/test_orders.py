"""Tests of shelf.orders; a test returns what it got and what it expected."""

from shelf.orders import Order
from shelf.stock import Stock


def test_an_order_is_priced_with_tax() -> tuple[int, int]:
    """Two articles of 5.00 make 12.00 with 20 percent tax."""
    order = Order()
    order.add("cup", 500, 2)
    return order.total(), 1200


def test_shipping_empties_the_shelf() -> tuple[int, int]:
    """What is shipped is no longer there."""
    order, stock = Order(), Stock()
    stock.add("cup", 3)
    order.add("cup", 500, 2)
    order.ship(stock)
    return stock.count("cup"), 1
