import pytest

from agentrl.sandbox import close_pools


@pytest.fixture(autouse=True)
async def no_pool_outlives_its_loop():
    yield
    await close_pools()
