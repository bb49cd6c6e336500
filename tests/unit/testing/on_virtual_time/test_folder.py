import asyncio

import pytest


@pytest.fixture
async def slow_to_set_up() -> float:
    await asyncio.sleep(500)
    return asyncio.get_running_loop().time()


async def test_fixtures_and_tests_of_the_folder_share_one_virtual_loop(slow_to_set_up: float) -> None:
    await asyncio.sleep(1000)
    assert (slow_to_set_up, asyncio.get_running_loop().time()) == (500, 1500)
