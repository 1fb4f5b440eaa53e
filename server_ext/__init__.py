"""The server side of bidikv: what runs beside or inside vLLM, and what starts it.

`core` is pure; `engine` lives in vLLM's engine-core process; `http` in its API server; `launch` starts a local
stack; `cli` is the `bidikv` command. Imports go down only: cli -> launch -> core, http -> engine -> core.
"""
