"""The HTTP side of bidikv, inside vLLM's own API server.

Read in this order: `plugin` (what vLLM loads), `routes` (the session routes of D), `conductor` (a turn, from begin to
settle), `turn_request`, `render` (exact continuation), `prefill_client` and `prefill_route` (D's call to P, and P's
answer), `home_client` (the way into D's engine core).
"""
