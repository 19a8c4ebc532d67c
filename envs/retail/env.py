"""The environment: identify the customer, look, act or refuse, say goodbye."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from agentrl.env import ToolEnv, reward, tool
from agentrl.env.play import ScriptedPolicy, call, say
from agentrl.env.tasks import Split, generated
from agentrl.env.toolenv.observe import plain_text
from agentrl.envs.retail.shop import RETURN_DAYS, TODAY, Order, Refusal, ShopError, build
from agentrl.envs.retail.user import Customer
from agentrl.types import Message, Task


class Retail(ToolEnv):
    """Customer service bound by rules."""

    def system(self) -> str:
        return (
            "You serve the customers of a shop. First ask for the e-mail address and the order number, and "
            "identify the customer. Only pending orders can be cancelled or sent to another address. Items can be "
            f"returned within {RETURN_DAYS} days after delivery; today is day {TODAY}. What the rules forbid "
            "you record with refuse, with the reason. When done, tell the customer."
        )

    def setup(self, shop: int) -> str:
        self.shop, self.request = build(shop)
        self.wanted, _ = build(shop)
        self.request.apply(self.wanted)
        self.customer = Customer(self.request)
        self.email = ""
        return self.customer.opening()

    def respond(self, message: Message) -> str | None:
        return self.customer.answer(plain_text(message.content))

    @tool
    def identify(self, email: str) -> str:
        """Identify the customer by e-mail; needed before anything else."""
        if email not in self.shop.customers:
            raise ShopError("no customer has this e-mail")
        self.email = email
        return self.shop.customers[email]

    @tool
    def order(self, order: str) -> dict[str, Any]:
        """Show an order of the customer."""
        found = self._own(order)
        delivered = {} if found.delivered_on is None else {"delivered_on_day": found.delivered_on}
        return {"status": found.status, **delivered, "address": found.address, "items": found.items}

    @tool
    def cancel(self, order: str) -> str:
        """Cancel a pending order."""
        self.shop.cancel(self._own(order))
        return "cancelled"

    @tool
    def change_address(self, order: str, address: str) -> str:
        """Send a pending order to another address."""
        self.shop.move(self._own(order), address)
        return "changed"

    @tool
    def return_items(self, order: str, items: list[str]) -> str:
        """Take back items of a delivered order."""
        self.shop.take_back(self._own(order), items)
        return "returned"

    @tool
    def refuse(self, order: str, reason: Refusal) -> str:
        """Record that a request cannot be served: it is for a shipped or delivered order, comes too late, or
        concerns items that are not delivered yet."""
        self.shop.refused[self._own(order).id] = reason
        return "recorded"

    def _own(self, number: str) -> Order:
        if not self.email:
            raise ShopError("identify the customer first")
        found = self.shop.orders.get(number)
        if found is None or found.email != self.email:
            raise ShopError("the customer has no such order")
        return found

    @reward(solved=True)
    def solved(self) -> bool:
        """The database is exactly as it should be: what was wanted was done or refused, and nothing else."""
        return self.shop == self.wanted

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int | None = None) -> Sequence[Task]:
        """Shops by number; every tenth number is held out."""

        def row(rng: random.Random) -> dict[str, object]:
            number = rng.getrandbits(30) * 10
            return {"shop": number if split == "held_out" else number + rng.randint(1, 9)}

        return generated(
            "retail", split, seed, (1_000_000 if split == "train" else 1_000) if size is None else size, row
        )

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """Asks, looks, and does what the rules say of what it saw."""
        _, request = build(task.row["shop"])
        act = {
            "cancel": call("cancel", order=request.order),
            "move": call("change_address", order=request.order, address=request.address),
            "return": call("return_items", order=request.order, items=list(request.items)),
        }[request.kind]
        if request.refusal is not None:
            act = call("refuse", order=request.order, reason=request.refusal)
        ask = say("What is your e-mail address, and the order number?")
        look = [call("identify", email=request.email), call("order", order=request.order)]
        return ScriptedPolicy([ask, *look, act, say("It is settled. Goodbye.")])
