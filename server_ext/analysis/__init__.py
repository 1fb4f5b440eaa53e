"""Answers, from a user's own logs, whether decode-to-prefill reuse pays: what `bidikv analyze` runs.

In call order: `sources` (files, folders, standard input) feeds lines to `formats` (one parser per log format:
`openai`, `vllm_log`, `traces`), which build `requests`; `sessions` (with `attic`) groups them into turns and
asks `misses` why a prompt stopped repeating; `turns` spools one small row per turn to disk. From the rows,
`questions` and `ttft` answer (a) to (d), with `limits` over the constants of `hardware`, and with `replay`,
which drives the server's own lease table; `verdict` decides; `report` runs and holds it all, `html` (with
`svg`) draws it. `problems` counts what was odd.

Pure but for reading and spooling. May import `server_ext.core`, `bidikv_sdk.{wire, prefix}`, numpy and
msgspec; no vllm, torch, web framework, engine or HTTP code.
"""
