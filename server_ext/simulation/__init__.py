"""Simulates fleets of prefill and decode engines, without engines."""
