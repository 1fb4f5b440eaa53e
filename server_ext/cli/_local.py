"""Why an engine of the local stack is not there, from its own log: what it refuses at start-up, it says there."""

from __future__ import annotations

import re

from server_ext.cli._findings import Finding, failed
from server_ext.launch.command import ROLES
from server_ext.launch.stack import default_state_dir

# How the engine's refusals begin (server_ext/engine/compat.py, settings.py and core/settings.py); each names its fix.
_REFUSAL = re.compile(r"\bbidikv (?:cannot serve this configuration: |setting |supports vLLM ).*")


def explain_from_logs() -> list[Finding]:
    """Return a finding for each engine whose last log holds a refusal."""
    findings = []
    for role in ROLES:
        path = default_state_dir() / f"{role}.log"
        found = _REFUSAL.findall(path.read_text("utf-8", errors="replace")) if path.exists() else []
        if found:
            # Such a message names the setting, its value and what to do.
            text = f"it refused to start: {found[-1]}"
            findings.append(failed(f"{role} engine", text, "correct that, and start again"))
    return findings
