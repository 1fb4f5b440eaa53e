"""The vLLM side of bidikv: connector, reader, home, guard and control method.

Read in this order: `plugin` (what vLLM loads), `connector` (the facade with vLLM's hooks), `decode` (D: leases) and
`prefill` (P: reads), `worker` (NIXL), `pins` (the block pool), `compat` (everything that depends on vLLM's version).
"""
