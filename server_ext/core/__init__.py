"""The home of sessions: every decision of the server that needs no engine, as pure code.

`home` answers the control channel's operations and composes the two tables: `sessions` (what was said, over
`session_store`) and `leases` (what stays in the block pool, over `holdings`, `ledger`, `lost`, `deadlines`,
`ticket_desk` and `revocation`). `routing` chooses the way of each turn, by `cost_model`, `cost` and `rates` (over
`linear_fit`; `steps` watches the scheduler). `policy` decides whose blocks give way, from what `gaps` and `rates`
know; `metrics`, `snapshot` and `journal` tell operators. `tickets` signs and checks the permission to read; `ports`
is what the engine must provide; `settings` and `errors` are shared.

One thread owns a home, so nothing here locks; time is the argument `now_s` (monotonic seconds). May import
the standard library and `bidikv_sdk.{wire, prefix}`, but no vllm, torch, web framework, clock, thread or
event loop.
"""
