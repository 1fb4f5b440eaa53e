"""Integrations with agent frameworks: one module each, imported by name, and needing the extra of that name.

They may import the public names of `bidikv_sdk`, `_branches` and `_known`; the rest of the package never imports them.
"""
