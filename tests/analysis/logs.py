"""Hand-made logs: builders of lines in each format, and a generator of long ones.

As a program, `python logs.py MEGABYTES > log.jsonl` writes an OpenAI-style log of that size.
"""

import json
import random
import sys
from contextlib import closing

from server_ext.analysis.formats import Parser
from server_ext.analysis.hardware import find_gpu, find_link, find_model
from server_ext.analysis.limits import Limits
from server_ext.analysis.problems import Problems
from server_ext.analysis.report import Options, analyze
from server_ext.analysis.sessions import Sessions

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("ls", "cat")]
SYSTEM = {"role": "system", "content": "You fix bugs. " * 60}


def user(text):
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text):
    """An assistant's message."""
    return {"role": "assistant", "content": text}


def tool(text):
    """A tool's result."""
    return {"role": "tool", "tool_call_id": "c1", "content": text}


def chat(messages, *, t=0.0, session="s1", tools=None, output=16, duration_s=1.0, **more):
    """One line of an OpenAI-style log."""
    line = {"timestamp": 1.7e9 + t, "session_id": session, "model": "m", "messages": messages}
    line |= {"usage": {"completion_tokens": output}, "duration_s": duration_s} | more
    return {name: value for name, value in line.items() if value is not None} | ({"tools": tools} if tools else {})


def ids(num_tokens, *, t, session="s1", output=0, seed=0, history=(), **more):
    """A line whose prompt is `history` and ids that no other seed has, `num_tokens` in all."""
    prompt = [*history, *(seed * 100_000 + i for i in range(num_tokens - len(history)))]
    line = {"timestamp": 1.7e9 + t, "session_id": session, "prompt_token_ids": prompt, "duration_s": 0.0}
    line |= {"usage": {"completion_tokens": output}} | more
    return {name: value for name, value in line.items() if value is not None}


def growing(sizes, times, *, session="s1", **more):
    """A session that only appends: prompts of these sizes at these times."""
    lines, history = [], []
    for size, t in zip(sizes, times, strict=True):
        lines.append(ids(size, t=t, session=session, history=history, seed=len(lines) + 1, **more))
        history = lines[-1]["prompt_token_ids"]
    return lines


def trace(requests, **more):
    """A kv-cache-tester trace."""
    return {"id": "trace_1", "block_size": 64, "hash_id_scope": "local", "requests": requests} | more


def as_lines(items, name="log"):
    """Items, JSON or text, as a reader gives them."""
    return [
        (f"{name}:{number}", (item if isinstance(item, str) else json.dumps(item)).encode())
        for number, item in enumerate(items, 1)
    ]


def parse(items):
    """The requests of items, and what was odd."""
    problems = Problems()
    return list(Parser(problems).parse(as_lines(items))), problems


def turns_of(items, **more):
    """[(session, turn, miss)] of items, and what was odd."""
    problems = Problems()
    with closing(Sessions(problems, **more)) as sessions:
        return list(sessions.turns(Parser(problems).parse(as_lines(items)))), problems


def limits(model="llama-3.1-8b", gpu="h100", link="400g", **more):
    """A model, a GPU and a link by their names."""
    return Limits(find_model(model), find_gpu(gpu), find_link(link), **more)


def report_of(items, **more):
    """The whole analysis of items."""
    options = Options(**{"limits": limits(), "budgets": (1.0,), "ttls_s": (60.0,), "num_nodes": 1} | more)
    return analyze([as_lines(items)], Problems(), options)


def agents(*, seed=1, num_sessions=40, max_bytes=60_000):
    """Yield lines of agents that never stop: a session ends at `max_bytes` of history and another one begins."""
    rng = random.Random(seed)
    sessions, number, t = {}, 0, 0.0
    while True:
        slot = rng.randrange(num_sessions)
        if slot not in sessions or len(json.dumps(sessions[slot][1])) > max_bytes:
            number += 1
            sessions[slot] = (f"agent-{number}", [SYSTEM, user(f"task {number} " * 300)])
        session, messages = sessions[slot]
        t += rng.expovariate(4.0)
        yield chat(messages, t=t, session=session, tools=TOOLS, output=60, duration_s=1.5)
        sessions[slot] = (session, [*messages, assistant("a" * 240), tool(f"{rng.random()} " * 120)])


def write_log(stream, num_bytes, **more):
    """Write lines of `agents` until there are `num_bytes`."""
    written = 0
    for line in agents(**more):
        written += stream.write(json.dumps(line) + "\n")
        if written >= num_bytes:
            return


if __name__ == "__main__":
    write_log(sys.stdout, int(float(sys.argv[1]) * 1e6))
