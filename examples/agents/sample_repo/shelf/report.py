"""Reports as text, for the person who opens the shop in the morning."""

from shelf.stock import Stock


def euros(cents: int) -> str:
    """Return an amount as people write it, such as 12.05."""
    return f"{cents // 100}.{cents % 100:02d}"


def shopping_list(stock: Stock, minimum: int) -> str:
    """Return one line for each article that must be bought again."""
    return "\n".join(f"{article}: {stock.count(article)} left" for article in stock.to_buy(minimum))
