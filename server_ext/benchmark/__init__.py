"""`bidikv bench`: the same agents through every way that a turn can go, and what each way costs.

A *scenario* plans sessions; an *arm* is one way to serve their turns; a *round* runs every arm once over the same plan,
in an order drawn anew; a *sample* is one turn of one arm. The client's side only: engines are reached over HTTP.

Order: `scenarios` -> `arms` -> `rounds` -> `samples` -> `summary` -> `table`, `page`. May import the SDK, `core` and
`traffic`; no vLLM, no web framework.
"""
