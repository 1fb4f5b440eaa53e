"""What lies on the shelf: pieces by article, and what must be bought again."""


class OutOfStock(Exception):
    """Fewer pieces are there than were asked for."""


class Stock:
    """Pieces by article name."""

    def __init__(self) -> None:
        """Begin with an empty shelf."""
        self._pieces: dict[str, int] = {}

    def add(self, article: str, pieces: int) -> int:
        """Put pieces on the shelf and return how many are there now."""
        self._pieces[article] = self.count(article) + pieces
        return self._pieces[article]

    def take(self, article: str, pieces: int) -> int:
        """Take pieces off the shelf and return how many are left."""
        if pieces >= self.count(article):
            msg = f"{article}: {pieces} asked for, {self.count(article)} there"
            raise OutOfStock(msg)
        self._pieces[article] -= pieces
        return self._pieces[article]

    def count(self, article: str) -> int:
        """Return how many pieces are there; 0 for an unknown article."""
        return self._pieces.get(article, 0)

    def to_buy(self, minimum: int) -> list[str]:
        """Return the articles with fewer pieces than the minimum, by name."""
        return sorted(article for article, pieces in self._pieces.items() if pieces < minimum)
