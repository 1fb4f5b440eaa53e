"""Prices in cents: the only place where money is computed."""

DISCOUNT_FROM = 10
DISCOUNT_PERCENT = 15


def line_total(price: int, pieces: int) -> int:
    """Return what pieces of one article cost, with the discount for a full box."""
    total = price * pieces
    if pieces > DISCOUNT_FROM:
        total -= total * DISCOUNT_PERCENT // 100
    return total


def with_tax(total: int, percent: int = 20) -> int:
    """Return the total with tax; half a cent is rounded up."""
    return total + (total * percent + 50) // 100
