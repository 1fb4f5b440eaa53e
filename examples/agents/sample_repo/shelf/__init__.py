"""Stock, prices and orders of a small shop."""
