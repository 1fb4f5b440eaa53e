"""Eight reviewers who have all read the same document, which was computed once.

    BIDIKV_BASE_URL=http://127.0.0.1:8200/v1 python examples/agents/fan_out.py DOCUMENT

`fork` gives each of them a session that begins on the reader's own blocks: nothing is copied, nothing computed again,
and ending one takes nothing from the others. They run at the same time; the reader then gets to hear what they said.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from bidikv_sdk import AsyncBidiKV, AsyncSession, Turn

CHAT: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 64}
LOOKS = ("errors", "gaps", "clarity", "tone", "structure", "examples", "numbers", "claims")


async def review(reader: AsyncSession, look: str) -> Turn:
    """Ask one reviewer, who knows all that the reader knows."""
    async with await reader.fork() as reviewer:
        return await reviewer.send(f"Review the document for its {look} only. One sentence.")


async def run(client: AsyncBidiKV, document: str) -> tuple[list[Turn], Turn]:
    """Return all reviews, and the reader's verdict."""
    async with client.session(system="You review documents.", **CHAT) as reader:
        await reader.send(f"Read this, and say only that you have read it.\n\n{document}")
        async with reader.hold():
            reviews = await asyncio.gather(*(review(reader, look) for look in LOOKS))
        said = "\n".join(f"{look}: {turn.text}" for look, turn in zip(LOOKS, reviews, strict=True))
        return reviews, await reader.send(f"The reviewers say:\n{said}\n\nWhat is to be done first?")


async def main(document: str) -> None:
    """Review the document, and print what was said."""
    async with AsyncBidiKV() as client:
        reviews, verdict = await run(client, document)
    for look, turn in zip(LOOKS, reviews, strict=True):
        print(f"{look}: {turn.text} ({turn.cache.fetched_tokens} of {turn.cache.prompt_tokens} tokens fetched)")
    print(verdict.text)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).read_text("utf-8")))
