"""Everything that can be done with a lease by hand: look at it, extend it, give it back, list all of them.

    BIDIKV_BASE_URL=http://127.0.0.1:8200/v1 python examples/agents/leases.py

An agent that waits for a person does not know for how long. It extends its lease while waiting is worth the memory, and
gives the cache back when it is not: the conversation goes on either way, it only costs one computation more.
"""

from typing import Any

from bidikv_sdk import BidiKV, LeaseLost, Session, SessionInfo

CHAT: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 32}


def told(info: SessionInfo) -> str:
    """Describe a session's lease in one line."""
    lease = info.lease
    blocks = f"{lease.num_blocks} blocks ({lease.num_tokens} tokens)"
    return f"{info.session[:8]} turn {info.turn}: {lease.state}, {lease.remaining_s:.0f} s left, {blocks}"


def wait_for_a_person(session: Session, minutes: int) -> bool:
    """Keep the lease for so many minutes, if that can be had; tell whether it could."""
    try:
        lease = session.extend(60 * minutes)
    except LeaseLost as lost:
        print(f"too late, it is gone ({lost.reason}): the next turn computes its prompt again")
        return False
    print(f"asked for {60 * minutes} s, got {lease.remaining_s:.0f} s")
    return True


def run(client: BidiKV) -> None:
    """Take two conversations through the life of their leases."""
    with client.session(**CHAT, ttl_s=30) as short, client.session(**CHAT) as long:
        for session in (short, long):
            session.send("We will go on later. Remember the word 'harbour'.")
        wait_for_a_person(long, minutes=10)
        for info in client.sessions():
            print(told(info))
        released = short.release()
        print(f"{told(released)}; {released.pool.free_blocks} of {released.pool.total_blocks} blocks are free")
        wait_for_a_person(short, minutes=1)
        for session in (short, long):
            turn = session.send("Which word was it?")
            print(f"{turn.cache.outcome} ({turn.cache.reason}): {turn.cache.computed_tokens} tokens computed")


if __name__ == "__main__":
    with BidiKV() as client:
        run(client)
