"""A made-up pair of engines with noise: what a turn takes on each way, by a model that knows nothing of the learner."""

from dataclasses import dataclass, field
from random import Random

from server_ext.core.cost import Choice, Observed, Start
from server_ext.core.cost_model import CostModel
from server_ext.core.rates import ConstantRates, LearnedRates


@dataclass
class World:
    """True costs, and how much they scatter.

    `decode_slowdown` is how much slower D computes than P, and `survival` the chance that P's cache keeps a session.
    """

    rng: Random
    token_s: float
    fixed_s: float
    attention_tokens: float
    token_bytes: float
    step_s: float
    bytes_per_s: float = 1e9
    link_s: float = 0.005
    decode_slowdown: float = 1.0
    survival: float = 0.0
    noise: float = 0.1

    def compute_s(self, num_tokens, num_cached, slowdown=1.0):
        """Return the true time to compute."""
        work = num_tokens + num_tokens * (2 * num_cached + num_tokens) / self.attention_tokens
        return self.fixed_s + slowdown * self.token_s * work

    def parts_s(self, way, num_tokens, num_matched, num_cached):
        """Return what fetching, P's computing, and all until the first token on D truly take."""
        handover_s = self.link_s + (num_tokens - num_matched) * self.token_bytes / self.bytes_per_s + self.step_s
        if way == "local":
            return 0.0, 0.0, self.compute_s(num_tokens - num_matched, num_matched, self.decode_slowdown)
        if way == "prefill":
            return 0.0, self.compute_s(num_tokens - num_cached, num_cached), handover_s
        num_read = max(num_matched - num_cached, 0)
        fetch_s = self.link_s + num_read * self.token_bytes / self.bytes_per_s if num_read else 0.0
        num_there = num_cached + num_read
        return fetch_s, self.compute_s(num_tokens - num_there, num_there), handover_s

    def expected_s(self, way, num_tokens, num_matched, num_cached):
        """Return what a way truly takes on the mean."""
        hit_s = sum(self.parts_s(way, num_tokens, num_matched, num_cached))
        missed_s = sum(self.parts_s(way, num_tokens, num_matched, 0))
        return self.survival * hit_s + (1 - self.survival) * missed_s

    def scattered(self, seconds):
        """Return a time with noise."""
        return seconds * self.rng.lognormvariate(0, self.noise)


def cpu(rng, **changes):
    """Return a small model on slow cores: computing is dear, links are fast beside it."""
    return World(rng, **{"token_s": 1 / 800, "fixed_s": 0.03, "attention_tokens": 6100, "token_bytes": 46_080,
                         "step_s": 0.03} | changes)  # fmt: skip


def gpu(rng, **changes):
    """Return an 8 B model on a data-center GPU."""
    return World(rng, **{"token_s": 1 / 35_000, "fixed_s": 0.008, "attention_tokens": 53_000, "token_bytes": 131_072,
                         "step_s": 0.012} | changes)  # fmt: skip


@dataclass
class Took:
    """One turn: what was chosen, and what each way would truly have taken on the mean."""

    choice: Choice
    expected_s: dict[str, float]

    @property
    def loss(self):
        """How much longer the chosen way takes than the best one."""
        return self.expected_s[self.choice.way] / min(self.expected_s.values())


@dataclass
class Fleet:
    """Sessions that take turns with a cost model in a world."""

    world: World
    num_sessions: int = 4
    sessions: list = field(default_factory=list)
    now_s: float = 0.0
    num_turns: int = 0

    def __post_init__(self):
        self.model = CostModel(
            LearnedRates(ConstantRates(attention_tokens=self.world.attention_tokens)),
            token_bytes=self.world.token_bytes,
        )
        self.sessions = [[0, 0] for _ in range(self.num_sessions)]

    def run(self, num_turns):
        """Run so many turns, one session after the other, and return them."""
        return [self._turn() for _ in range(num_turns)]

    def _turn(self):
        world, rng = self.world, self.world.rng
        self.num_turns += 1
        index = self.num_turns % self.num_sessions
        key, session = ("tenant", str(index)), self.sessions[index]
        if session[0] > 6500:
            session[:] = [0, 0]
            self.model.forget(key)
        num_matched, num_cached = session
        num_tokens = num_matched + rng.randint(40, 150) if num_matched else rng.randint(600, 2400)
        nonce = f"nonce-{self.num_turns}"
        start = Start(key=key, prompt_tokens=num_tokens, matched_tokens=num_matched)
        choice = self.model.choose(nonce, start, now_s=self.now_s)
        ways = ("local", "fetch", "prefill") if num_matched else ("local", "prefill")
        took = Took(choice, {way: world.expected_s(way, num_tokens, num_matched, num_cached) for way in ways})
        num_hit = num_cached if rng.random() < world.survival else 0
        parts = world.parts_s(choice.way, num_tokens, num_matched, num_hit)
        fetch_s, compute_s, rest_s = (world.scattered(seconds) for seconds in parts)
        is_local = choice.way == "local"
        observed = Observed(
            prompt_tokens=num_tokens,
            reused_tokens=num_matched if is_local else num_hit,
            fetched_tokens=max(num_matched - num_hit, 0) if choice.way == "fetch" else 0,
            prefill_s=None if is_local else fetch_s + compute_s,
            fetch_s=fetch_s or None,
            handover_s=rest_s,
            pair=None if is_local else "",
        )
        self.model.settle(nonce, observed, now_s=self.now_s + fetch_s + compute_s + rest_s)
        self.now_s += fetch_s + compute_s + rest_s + 20
        session[:] = num_tokens + rng.randint(20, 60), num_cached if is_local else num_tokens
        return took


def mean_loss(turns):
    """Return how much longer turns took on their ways than on the best ones, all together."""
    best_s = sum(min(turn.expected_s.values()) for turn in turns)
    return sum(turn.expected_s[turn.choice.way] for turn in turns) / best_s
