"""What is said while the parts of a run start."""

from __future__ import annotations

import asyncio

import pytest

from molt.driver import house
from molt.driver.house import Starting, answering
from molt.errors import MoltError


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


class Group:
    """Ranks of which one dies at the third look."""

    num_looks = 0

    async def settle(self) -> None:
        self.num_looks += 1
        if self.num_looks == 3:
            raise MoltError("trainer rank 0 died")


@pytest.mark.parametrize("is_late", [True, False])
async def test_ranks_that_die_while_engines_are_on_their_way_end_the_start(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "_LOOK_S", 0.01)
    group = Group()

    async def there() -> Group:
        return group

    engines = asyncio.create_task(asyncio.sleep(60 if is_late else 0))
    async with asyncio.timeout(10):
        watching = answering(asyncio.create_task(there()), until=engines)  # type: ignore[arg-type]
        if is_late:
            with pytest.raises(MoltError, match="rank 0 died"):
                await watching
        else:
            await watching
            assert group.num_looks < 3
    engines.cancel()
