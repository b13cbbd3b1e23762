"""What is said while the parts of a run start."""

from __future__ import annotations

import asyncio

from molt.driver.house import Starting


async def test_what_is_still_on_its_way_is_named() -> None:
    said: list[str] = []
    starting = Starting(said.append, "engines", "ranks")
    gate = asyncio.Event()

    async def late() -> int:
        await gate.wait()
        return 2

    async def soon() -> int:
        return 1

    ranks = asyncio.create_task(starting.part("ranks", late()))
    assert await starting.part("engines", soon()) == 1
    assert said == ["starting engines, ranks", "starting ranks; engines are there"]
    gate.set()
    assert await ranks == 2 and len(said) == 2
