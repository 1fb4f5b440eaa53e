"""Starts, watches and stops a local stack of two engines: P (prefill) and D (decode)."""
