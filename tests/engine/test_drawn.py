"""Drawn cases on real stacks of both block sizes: whatever P and D hold, a turn is what a cold run of its prompt is.

Each test is a session of cases (`drawing`) that begin where the one before left both caches. A turn must give the
tokens of a cold run, log-probabilities and every key and value of both engines within 1e-3 of it, and a report that a
tiny model of the two caches agrees with. Everything is drawn from the test's parameters, so
`tests/engine/test_drawn.py::test_a_drawn_session[32-17]` repeats a session alone; a failure names its case.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from server_ext.launch.tiny import TINY, ensure_tiny

from .common import eventually
from .copies import Copy, farthest
from .drawing import NUM_TURNS, Case, Held, PrefixCache, draw, expected, expected_reason, num_common
from .talk import Said, Talk, read_completion, words

if TYPE_CHECKING:
    from .rig import Rig

NUM_SESSIONS = 32  # of each block size; with NUM_TURNS cases each
TOLERANCE = 1e-3
REVOKED: defaultdict[int, list[bool]] = defaultdict(list)
"""Of each block size: for every case that should revoke, whether it did. All sessions add to it."""
FEWEST_TRIES = 8
LEAST_SHARE_REVOKED = 0.4  # the requests must run at the same time; three of four times they do
BEGUN: Counter[int] = Counter()
"""Sessions that have begun, of each block size."""
CAME: defaultdict[int, Counter[str]] = defaultdict(Counter)
"""How the cases of each block size came, and how many were fetched in front of a change of the history."""
# Of NUM_SESSIONS * NUM_TURNS cases, well below what the weights of the draw come to.
LEAST_FETCHED = 64
LEAST_OF_OTHERS = 8
LONGEST_PROMPT = 900
ANSWER = "<|im_start|>assistant\n"
CLOSING = "<|im_end|>\n"
DEFAULT_SYSTEM = {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}
STOPS = ("a", "e", "i", "1", " ")


@pytest.mark.parametrize("seed", range(NUM_SESSIONS))
@pytest.mark.parametrize("block_size", [32, 64])
def test_a_drawn_session(drawn: Rig, block_size: int, seed: int) -> None:
    """Every turn of a drawn session is right, and says rightly where its prompt's KV cache came from."""
    random = Random(f"{block_size}-{seed}")
    session = Session(drawn, block_size, random)
    BEGUN[block_size] += 1
    session.open()
    for number in range(1, NUM_TURNS + 1):
        case = draw(random)
        try:
            session.play(case)
        except BaseException as error:
            error.add_note(f"block size {block_size}, seed {seed}, case {number}: {case}")
            held, last = session.held, session.talk.last
            error.add_note(f"held: {len(held.token_ids)} tokens, {held.reason}; last report: {last and last.cache}")
            raise


@pytest.mark.parametrize("block_size", [32, 64])
def test_drawn_requests_really_take_blocks(drawn: Rig, block_size: int) -> None:
    """Of the cases before that should revoke, most did: a case passes where the requests just waited for each other."""
    tries = REVOKED[block_size]
    if len(tries) < FEWEST_TRIES:
        pytest.skip(f"only {len(tries)} cases that should revoke have run, too few to tell")
    assert sum(tries) >= LEAST_SHARE_REVOKED * len(tries), f"{sum(tries)} of {len(tries)}"


@pytest.mark.parametrize("block_size", [32, 64])
def test_every_drawn_case_has_run_and_all_ways_were_gone(drawn: Rig, block_size: int) -> None:
    """No session was cut short, and what is drawn is not all of one kind: reads above all, also of a part."""
    if BEGUN[block_size] < NUM_SESSIONS:
        pytest.skip(f"only {BEGUN[block_size]} of {NUM_SESSIONS} sessions have run")
    came = CAME[block_size]
    num_in_part = came.pop("fetched in part")
    assert came.total() == NUM_SESSIONS * NUM_TURNS
    assert set(came) == {"fetched", "prefilled", "local", "recomputed"}
    assert came["fetched"] >= LEAST_FETCHED, came
    assert min(num_in_part, *came.values()) >= LEAST_OF_OTHERS, (num_in_part, came)


@dataclass
class Past:
    """One completed turn as its client knows it.

    - `token_ids`: of the history with it.
    - `pending_text`: the end of its answer that they do not cover.
    """

    turn: int
    num_messages: int
    token_ids: list[int]
    pending_text: str


@dataclass
class Asked:
    """A turn's prompt as text, and what is known of it before it is asked.

    - `messages`: the whole history with it.
    - `body`: what is sent.
    - `predicted_ids`: its ids; exactly those where `exact`.
    - `changed`: whether the first message that the caller changed is the system's or another one; None for neither.
    """

    path: str
    body: dict[str, Any]
    messages: list[dict[str, Any]]
    predicted_ids: list[int]
    exact: bool
    pasts: list[Past]
    changed: str | None = None


@dataclass
class Session:
    """One session, its client's view of it, and the model of both caches."""

    rig: Rig
    block_size: int
    random: Random
    messages: list[dict[str, Any]] = field(default_factory=list)
    pasts: list[Past] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin without anything held."""
        self.talk: Talk = self.rig.talk()
        self.held = Held([], "first_turn")
        self.on_prefill, self.on_decode = PrefixCache(self.block_size), PrefixCache(self.block_size)
        self.tokenizer = Tokenizer.from_file(str(ensure_tiny() / "tokenizer.json"))

    # ---------------------------------------------------------------- one case

    def open(self) -> None:
        """Run the first turn, on a P that has nothing."""
        self._reset_prefill()
        system = {"role": "system", "content": f"Be terse about {self.random.randint(0, 99)}."}
        user = {"role": "user", "content": words(2 * self.random.randint(5, 150), "apples")}
        case = draw(self.random)
        case = replace(case, change="append", by="turn", aim=None, route="fetch", then="kept")
        self._run(case, self._asked_by_turn([], [system, user]))

    def play(self, case: Case) -> None:
        """Prepare P, run the turn, check it, and do to the lease what the case says."""
        asked = self._ask(case)
        self._warm_prefill(case, asked)
        self._run(case, asked)
        cache = self.talk.last.cache
        CAME[self.block_size][cache["outcome"]] += 1
        CAME[self.block_size]["fetched in part"] += cache["outcome"] == "fetched" and cache["diverged_at"] is not None

    def _run(self, case: Case, asked: Asked) -> None:
        self.rig.copies.forget()
        said, logprobs = self._say(case, asked)
        copies = [self.rig.copies.take("decode", said.prompt_ids)]
        if case.route != "local":
            copies.append(self.rig.copies.take("prefill", said.prompt_ids))
        self._verify_prompt(asked, said)
        self._verify_like_cold(case, said, logprobs, copies)
        self._verify_report(case, asked, said)
        self._note(case, asked, said)
        self._treat_lease(case)

    def _say(self, case: Case, asked: Asked) -> tuple[Said, list[float]]:
        limits = {"max_tokens": case.num_tokens, "logprobs": True, **case.sampling()}
        if case.end == "stop string":
            limits["stop"] = [self.random.choice(STOPS)]
        body = {**asked.body, **limits}
        body["bidikv"] = {"protocol": 1, "route": case.route, **({"ttl_s": 0.05} if case.then == "expired" else {})}
        response = self.rig.decode.post(asked.path, json=body, headers=self.talk.headers)
        assert response.status_code == 200, response.text
        reply = response.json()
        assert "bidikv" in reply, "the turn was served without its session"
        said = read_completion(reply)
        self.talk.num_turns = said.bidikv["turn"] - 1
        self.talk.took(said)
        return said, [token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]]

    # ---------------------------------------------------------------- how a turn is asked

    def _ask(self, case: Case) -> Asked:
        change = case.change
        if len(self.pasts[-1].token_ids) > LONGEST_PROMPT:
            change = "new"
        if change == "rewind" and len(self.pasts) > 1:
            self._rewind(self.random.randrange(len(self.pasts) - 1))
        if change == "fork":
            self._fork()
        if change == "again":
            return self._asked_by_chat(self.messages[:-1])
        if change == "new":
            return self._asked_by_chat([{"role": "user", "content": "Hi"}])
        user = {"role": "user", "content": words(max(case.num_words, 2), "plums") if case.num_words > 1 else "So?"}
        if change in {"edit", "cut"}:
            history = self._edited(case) if change == "edit" else self._cut(case)
            if case.by == "replace":
                return self._asked_by_replacing(history, user)
            return self._asked_by_chat([*history, user])
        self._aim(case, user)
        if case.by == "chat":
            return self._asked_by_chat([*self.messages, user])
        return self._asked_by_turn(self.messages, [user])

    def _asked_by_turn(self, history: list[dict[str, Any]], delta: list[dict[str, Any]]) -> Asked:
        body = self.talk.request(delta)
        return self._asked(f"/v1/sessions/{self.talk.id}/turns", body, [*history, *delta], len(history))

    def _asked_by_chat(self, messages: list[dict[str, Any]]) -> Asked:
        body = self.talk.request(messages)
        del body["turn"]
        return self._asked("/v1/chat/completions", body, messages, len(messages) - 1)

    def _asked_by_replacing(self, history: list[dict[str, Any]], user: dict[str, Any]) -> Asked:
        opened = {"session_id": self.talk.id, "messages": history, "turn": self.talk.num_turns, "replace": True}
        self.rig.decode.post("/v1/sessions", json=opened, headers=self.talk.headers).raise_for_status()
        self.pasts = []
        return self._asked_by_turn(history, [user])

    def _asked(self, path: str, body: dict[str, Any], messages: list[dict[str, Any]], num_old: int) -> Asked:
        """Say what is known: D goes on with its own ids behind the last turn that the messages begin with."""
        num_same = num_common(self.messages, messages[:num_old])
        pasts = [past for past in self.pasts if past.num_messages <= num_same]
        changed = None
        if num_same < len(self.messages):
            both = self.messages[num_same : num_same + 1] + messages[num_same : num_same + 1]
            changed = "system" if any(message["role"] == "system" for message in both) else "messages"
        if not pasts:
            return Asked(path, body, messages, self._ids_of(self._whole_text(messages)), False, pasts, changed)
        last = pasts[-1]
        rest = last.pending_text + CLOSING + self._text_of(messages[last.num_messages :]) + ANSWER
        return Asked(path, body, messages, last.token_ids + self._ids_of(rest), True, pasts, changed)

    def _edited(self, case: Case) -> list[dict[str, Any]]:
        """Change one word of one message."""
        index = int(case.at * len(self.messages))
        message = self.messages[index]
        pieces = message["content"].split(" ")
        pieces[int(case.prefix_at * len(pieces))] = "pears"
        return [*self.messages[:index], {**message, "content": " ".join(pieces)}, *self.messages[index + 1 :]]

    def _cut(self, case: Case) -> list[dict[str, Any]]:
        """Leave out a question with its answer, as a compaction does."""
        index = 1 + 2 * int(case.at * ((len(self.messages) - 1) // 2))
        return [*self.messages[:index], *self.messages[index + 2 :]]

    def _aim(self, case: Case, user: dict[str, Any]) -> None:
        """Lengthen a message until its prompt, or what D then holds, ends where it shall."""
        if case.aim is None or not self.pasts:
            return
        what, off_by = case.aim
        behind = case.num_tokens - 1 if what == "held" else 0
        for _ in range(self.block_size):
            rest = self.pasts[-1].pending_text + CLOSING + self._text_of([user]) + ANSWER
            num_tokens = len(self.pasts[-1].token_ids) + len(self._ids_of(rest))
            if (num_tokens + behind - off_by) % self.block_size == 0:
                return
            user["content"] += " so"

    # ---------------------------------------------------------------- what happens to caches

    def _warm_prefill(self, case: Case, asked: Asked) -> None:
        if case.prefix == "as it was" and self.on_prefill.num_tokens() < 800:
            return
        self._reset_prefill()
        held, past = self.held.token_ids, asked.predicted_ids
        num_held = len(held)
        token_ids = {
            "as it was": [],
            "none": [],
            "shorter": held[: int(case.prefix_at * num_held)],
            "same": held,
            "longer": past[: num_held + int(case.prefix_at * (len(past) - num_held))] if len(past) > num_held else past,
            "diverging": [*held[: int(case.prefix_at * num_held)], *range(1000, 1000 + 2 * self.block_size)],
        }[case.prefix]
        if token_ids:
            body = {"model": TINY, "prompt": token_ids, "max_tokens": 1, "temperature": 0}
            self.rig.prefill.post("/v1/completions", json=body).raise_for_status()
            self.on_prefill.add(token_ids)

    def _reset_prefill(self) -> None:
        reset = lambda: self.rig.prefill.post("/reset_prefix_cache").json()["success"]  # noqa: E731
        eventually(reset, "P with an empty prefix cache")
        self.on_prefill.reset()

    def _rewind(self, index: int) -> None:
        past = self.pasts[index]
        lease = self.talk.rewind(self.talk.last, turn=past.turn)["lease"]
        num_same = num_common(self.held.token_ids, past.token_ids)
        if 0 < num_same < len(self.held.token_ids):
            self.held = Held(self.held.token_ids[:num_same])
        assert lease["num_tokens"] == len(self.held.token_ids)
        self.pasts = self.pasts[: index + 1]
        self.messages = self.messages[: past.num_messages]

    def _fork(self) -> None:
        parent, self.talk = self.talk, self.talk.fork()
        parent.post("end").raise_for_status()
        assert self.talk.lease()["num_tokens"] == len(self.held.token_ids)
        self.held.lost = []

    def _treat_lease(self, case: Case) -> None:
        if case.then == "released":
            self.talk.release()
            self.held = Held([], "released")
        elif case.then == "expired":
            eventually(lambda: self.talk.lease()["state"] != "active", "the lease's end")
            self.held = Held([], "lease_expired", lost=self._whole_blocks())
        elif case.then == "revoked" and self.held.token_ids:
            self._revoke()

    def _revoke(self) -> None:
        """Have plain requests take some of the lease's blocks."""
        before = self.talk.info()
        num_requests, num_decoded = 3, 24
        num_wanted = before["pool"]["free_blocks"] + self.random.randint(1, before["lease"]["num_blocks"])
        num_prompt = -(-num_wanted // num_requests) * self.block_size - num_decoded
        prompts = [[1000 + self.random.randrange(1000) for _ in range(num_prompt)] for _ in range(num_requests)]
        body = {"model": TINY, "max_tokens": num_decoded, "temperature": 0, "ignore_eos": True}
        asked = [
            self.rig.threads.submit(self.rig.decode.post, "/v1/completions", json={**body, "prompt": prompt})
            for prompt in prompts
        ]
        for request in asked:
            request.result().raise_for_status()
        lease = self.talk.lease()
        num_left = lease["num_tokens"]
        assert num_left <= len(self.held.token_ids)
        REVOKED[self.block_size].append(num_left < len(self.held.token_ids))
        if num_left < len(self.held.token_ids):
            assert num_left == lease["num_blocks"] * self.block_size
            lost = [] if num_left else self._whole_blocks()
            self.held = Held(self.held.token_ids[:num_left], "lease_revoked", lost)

    def _whole_blocks(self) -> list[int]:
        return self.held.token_ids[: self.on_decode.whole(len(self.held.token_ids))]

    # ---------------------------------------------------------------- what must hold

    def _verify_prompt(self, asked: Asked, said: Said) -> None:
        """Check that a prompt continues D's own ids, and says what its messages say."""
        if asked.exact:
            assert said.prompt_ids == asked.predicted_ids
        text = self.tokenizer.decode(said.prompt_ids, skip_special_tokens=False)
        if "\ufffd" not in text:  # half a character, which text does not tell
            assert text == self._whole_text(asked.messages)

    def _verify_like_cold(self, case: Case, said: Said, logprobs: list[float], copies: list[Copy]) -> None:
        """Compare with the same prompt on P, nothing of which is cached."""
        body = {
            "model": TINY,
            "prompt": said.prompt_ids,
            "max_tokens": len(said.ids),
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": secrets.token_hex(8),
            **case.sampling(),
        }
        self.rig.copies.forget()
        (cold,) = self.rig.prefill.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        copy = self.rig.copies.take("prefill", said.prompt_ids)
        assert said.ids == cold["token_ids"]
        assert logprobs[: len(said.ids)] == pytest.approx(cold["logprobs"]["token_logprobs"], abs=TOLERANCE)
        assert len(copies[0].token_ids) >= len(said.prompt_ids) + len(said.ids) - 1
        for other in copies:
            assert farthest(copy, other) <= TOLERANCE

    def _verify_report(self, case: Case, asked: Asked, said: Said) -> None:
        """Compare the report with the model of both caches."""
        cache, prompt_ids = said.cache, said.prompt_ids
        held = self._held_at_begin(case, cache["held_tokens"])
        num_local = self.on_prefill.num_hit(prompt_ids)
        if case.route == "local":
            # What no lease holds may be gone from D's prefix cache, or still be there.
            assert cache["reused_tokens"] % self.block_size == 0
            assert cache["reused_tokens"] <= self.on_decode.num_hit(prompt_ids)
            num_local = cache["reused_tokens"]
        right = expected(case, prompt_ids, held, num_local)
        assert {name: cache[name] for name in vars(right)} == vars(right)
        num_matched = num_common(held.token_ids, prompt_ids)
        if len(prompt_ids) > num_matched:
            assert cache["computed_tokens"] >= 1
        assert cache["reason"] == expected_reason(case, right, held, num_matched, first_change=asked.changed)

    def _held_at_begin(self, case: Case, num_told: int) -> Held:
        """Return what D held when the turn had begun, with what it took up again of a lease that was gone."""
        if case.route != "fetch" or not self.held.lost:
            return self.held
        # Nothing has run on D since a lease expired; requests that took blocks from one may have used any of them.
        num_left = num_told if self.held.reason == "lease_revoked" else len(self.held.lost)
        assert num_left % self.block_size == 0
        assert num_left <= len(self.held.lost)
        return Held(self.held.lost[:num_left], self.held.reason)

    def _note(self, case: Case, asked: Asked, said: Said) -> None:
        """Take over what the turn has left: its messages, its ids, and what both engines hold now."""
        content = said.message["content"]
        num_kept = next(
            kept
            for kept in range(len(said.ids), -1, -1)
            if content.startswith(self.tokenizer.decode(said.ids[:kept], skip_special_tokens=True))
        )
        pending = content[len(self.tokenizer.decode(said.ids[:num_kept], skip_special_tokens=True)) :]
        if case.end == "own end":
            num_kept -= 1
        token_ids = said.prompt_ids + said.ids[:num_kept]
        self.messages = [*asked.messages, {"role": "assistant", "content": content}]
        self.pasts = [*asked.pasts, Past(said.bidikv["turn"], len(self.messages), token_ids, pending)]
        # The last token that was generated has never been fed back.
        held = token_ids[: len(said.prompt_ids) + len(said.ids) - 1]
        budget = int(0.2 * self.rig.pool_blocks) * self.block_size
        self.held = Held(held[:budget], "over_budget" if len(held) > budget else None)
        lease = said.lease
        assert (lease["num_tokens"], lease["reason"]) == (len(self.held.token_ids), self.held.reason)
        if case.route not in {"local", "recompute"}:
            self.on_prefill.add(said.prompt_ids)
        if case.route != "recompute":
            self.on_decode.add(held)

    # ---------------------------------------------------------------- text

    def _whole_text(self, messages: list[dict[str, Any]]) -> str:
        """Return what the template writes for a history; it puts a system prompt of its own where there is none."""
        system = [] if messages[0]["role"] == "system" else [DEFAULT_SYSTEM]
        return self._text_of([*system, *messages]) + ANSWER

    def _text_of(self, messages: list[dict[str, Any]]) -> str:
        return "".join(f"<|im_start|>{message['role']}\n{message['content']}{CLOSING}" for message in messages)

    def _ids_of(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids
