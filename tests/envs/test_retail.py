import pytest

from agentrl.envs.retail.env import Retail
from agentrl.envs.retail.shop import ShopError, build
from agentrl.envs.retail.user import PATIENCE, Customer
from agentrl.testing.policy import ScriptedPolicy, call, play, say
from agentrl.types import StopReason, Task


def shop_with(kind: str, refusal: str | None) -> int:
    for number in range(2000):
        _, request = build(number)
        if (request.kind, request.refusal) == (kind, refusal):
            return number
    raise AssertionError("no such shop")


KINDS = [
    ("cancel", None),
    ("cancel", "already_shipped"),
    ("move", None),
    ("return", None),
    ("return", "too_late"),
    ("return", "not_delivered"),
]


@pytest.mark.parametrize(("kind", "refusal"), KINDS)
async def test_doing_nothing_or_too_much_is_not_right(kind, refusal):
    task = Task("t", {"shop": shop_with(kind, refusal)})
    shop, request = build(task.row["shop"])
    right = await play(Retail(), task, Retail.oracle(task))
    assert right.rewards == {"solved": 1.0}
    assert right.stop_reason is StopReason.ANSWERED
    assert (await play(Retail(), task, ScriptedPolicy([say("Goodbye.")]))).rewards == {"solved": 0.0}
    oracle = Retail.oracle(task)
    other = next((o for o in shop.orders.values() if o.email == request.email and o.id != request.order), None)
    refused = other.id if other else request.order

    script = [oracle([]) for _ in range(4)]
    meddling = [
        *script,
        call("refuse", order=refused, reason="too_late" if refusal != "too_late" else "not_delivered"),
    ]
    assert (await play(Retail(), task, ScriptedPolicy([*meddling, "Goodbye."]))).rewards == {"solved": 0.0}


async def test_nothing_happens_before_the_customer_is_known_or_to_others():
    env = Retail()
    await env.reset(Task("t", {"shop": 5}))
    shop, request = build(5)
    stranger = next(o for o in shop.orders.values() if o.email != request.email)
    observation, *_ = await env.step(call("cancel", order=request.order))
    assert observation[0].content == "Error: ShopError: identify the customer first"
    await env.step(call("identify", email=request.email))
    observation, *_ = await env.step(call("order", order=stranger.id))
    assert observation[0].content == "Error: ShopError: the customer has no such order"


def test_the_rules_hold_in_the_shop_itself():
    number = shop_with("return", "too_late")
    shop, request = build(number)
    with pytest.raises(ShopError, match=r"was delivered .* days ago"):
        shop.take_back(shop.orders[request.order], list(request.items))
    shop, request = build(shop_with("return", None))
    order = shop.orders[request.order]
    with pytest.raises(ShopError, match="has no 'piano'"):
        shop.take_back(order, [*request.items, "piano"])
    assert set(order.items.values()) == {"kept"}
    shop.take_back(order, list(request.items))
    with pytest.raises(ShopError, match="could be returned"):
        shop.take_back(order, list(request.items))


def test_the_customer_answers_what_is_asked_and_loses_patience():
    _, request = build(1)
    customer = Customer(request)
    assert request.email not in customer.opening()
    assert request.order not in customer.opening()
    assert customer.answer("Your e-mail?") == f"My e-mail is {request.email}."
    assert customer.answer("Which order?") == f"The order is {request.order}."
    assert customer.answer("Are you sure?") == "Yes."
    assert customer.answer("Done.") is None
    patient = Customer(request)
    answers = [patient.answer("Hm?") for _ in range(PATIENCE + 1)]
    assert answers == ["Yes."] * PATIENCE + [None]
