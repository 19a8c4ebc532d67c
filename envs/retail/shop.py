"""The shop's database, the actions on it, and the rules they must keep. Dates are days; today is `TODAY`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

TODAY = 100
RETURN_DAYS = 30
Status = Literal["pending", "shipped", "delivered", "cancelled"]
Refusal = Literal["already_shipped", "too_late", "not_delivered"]
_FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kim", "Leo")
_LAST = ("Ash", "Birch", "Cole", "Drake", "Elm", "Frost", "Gale", "Hart", "Irwin", "Joyce")
_GOODS = ("lamp", "chair", "kettle", "spade", "puzzle", "tent", "bowl", "rope", "clock", "kite", "mug", "scarf")
STREETS = ("Mill Lane", "High Street", "Station Road", "Park Avenue", "Church Street")


class ShopError(Exception):
    """An action that the shop does not allow."""


@dataclass(slots=True)
class Order:
    """One order; `delivered_on` is a day for delivered ones, `items` maps goods to what became of them."""

    id: str
    email: str
    status: Status
    address: str
    items: dict[str, str]
    delivered_on: int | None = None


@dataclass(slots=True)
class Shop:
    """The whole state: customers by e-mail, orders by id, and the requests that were refused."""

    customers: dict[str, str]
    orders: dict[str, Order]
    refused: dict[str, str] = field(default_factory=dict)

    def cancel(self, order: Order) -> None:
        """Cancel a pending order. Raises ShopError."""
        self._must(
            order.status == "pending", f"order {order.id} is {order.status}; only pending ones can be cancelled"
        )
        order.status = "cancelled"

    def move(self, order: Order, address: str) -> None:
        """Send a pending order to another address. Raises ShopError."""
        self._must(
            order.status == "pending", f"order {order.id} is {order.status}; only pending ones can be changed"
        )
        order.address = address

    def take_back(self, order: Order, items: list[str]) -> None:
        """Return items of an order delivered at most `RETURN_DAYS` days ago. Raises ShopError."""
        day = order.delivered_on
        self._must(
            order.status == "delivered" and day is not None, f"order {order.id} is {order.status}, not delivered"
        )
        self._must(
            TODAY - (day or 0) <= RETURN_DAYS, f"order {order.id} was delivered {TODAY - (day or 0)} days ago"
        )
        for item in items:
            self._must(order.items.get(item) == "kept", f"order {order.id} has no {item!r} that could be returned")
        for item in items:
            order.items[item] = "returned"

    @staticmethod
    def _must(fine: bool, text: str) -> None:
        if not fine:
            raise ShopError(text)


@dataclass(frozen=True, slots=True)
class Request:
    """What the customer wants of one order; `refusal` is the reason it must be refused, if it must."""

    kind: Literal["cancel", "move", "return"]
    order: str
    email: str
    address: str = ""
    items: tuple[str, ...] = ()
    refusal: Refusal | None = None

    def apply(self, shop: Shop) -> None:
        """Bring `shop` to the state that serves the request rightly."""
        order = shop.orders[self.order]
        if self.refusal is not None:
            shop.refused[self.order] = self.refusal
        elif self.kind == "cancel":
            shop.cancel(order)
        elif self.kind == "move":
            shop.move(order, self.address)
        else:
            shop.take_back(order, list(self.items))


def build(seed: int) -> tuple[Shop, Request]:
    """The shop and the request of `seed`."""
    rng = random.Random(f"retail/{seed}")
    customers: dict[str, str] = {}
    while len(customers) < 8:
        first, last = rng.choice(_FIRST), rng.choice(_LAST)
        customers[f"{first}.{last}{rng.randint(10, 99)}@mail.example".lower()] = f"{first} {last}"
    orders: dict[str, Order] = {}
    for email in customers:
        for _ in range(rng.randint(1, 3)):
            order = _order(rng, email, orders)
            orders[order.id] = order
    shop = Shop(customers, orders)
    return shop, _request(rng, shop)


def _order(rng: random.Random, email: str, taken: dict[str, Order]) -> Order:
    while (number := f"W{rng.randint(1000, 9999)}") in taken:
        pass
    status: Status = rng.choice(("pending", "shipped", "delivered", "delivered"))
    delivered = rng.randint(TODAY - 60, TODAY - 1) if status == "delivered" else None
    items = dict.fromkeys(rng.sample(_GOODS, rng.randint(1, 3)), "kept")
    return Order(number, email, status, _address(rng), items, delivered)


def _address(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(STREETS)}"


def _request(rng: random.Random, shop: Shop) -> Request:
    order = rng.choice(list(shop.orders.values()))
    kind: Literal["cancel", "move", "return"] = rng.choice(("cancel", "move", "return"))
    refusal: Refusal | None = None
    if kind == "return":
        if order.delivered_on is None:
            refusal = "not_delivered"
        elif TODAY - order.delivered_on > RETURN_DAYS:
            refusal = "too_late"
        items = tuple(sorted(rng.sample(list(order.items), rng.randint(1, len(order.items)))))
        return Request(kind, order.id, order.email, items=items, refusal=refusal)
    if order.status != "pending":
        refusal = "already_shipped"
    address = _address(rng) if kind == "move" else ""
    while kind == "move" and address == order.address:
        address = _address(rng)
    return Request(kind, order.id, order.email, address=address, refusal=refusal)
