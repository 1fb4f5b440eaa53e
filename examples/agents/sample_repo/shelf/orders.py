"""Orders: what a customer asked for, priced and taken from the stock."""

from shelf.pricing import line_total, with_tax
from shelf.stock import Stock


class Order:
    """Articles with their price in cents and the number of pieces."""

    def __init__(self) -> None:
        """Begin without any article."""
        self._lines: list[tuple[str, int, int]] = []

    def add(self, article: str, price: int, pieces: int = 1) -> None:
        """Add an article to the order."""
        self._lines.append((article, price, pieces))

    def total(self) -> int:
        """Return the price of all lines, with tax."""
        return with_tax(sum(line_total(price, pieces) for _, price, pieces in self._lines))

    def ship(self, stock: Stock) -> None:
        """Take all lines off the shelf."""
        for article, _, pieces in self._lines:
            stock.take(article, pieces)
