"""The simulated customer: says what is wanted at once, gives e-mail and order number when asked, has patience."""

from __future__ import annotations

from agentrl.envs.retail.shop import Request

PATIENCE = 5


class Customer:
    """A scripted user. It leaves when the policy asks it nothing, or when it loses patience."""

    def __init__(self, request: Request) -> None:
        self._request, self._answers = request, 0

    def opening(self) -> str:
        """The first message; neither e-mail nor order number is in it."""
        if self._request.kind == "cancel":
            return "Hello, I want to cancel an order."
        if self._request.kind == "move":
            return f"Hello, please send an order of mine to {self._request.address} instead."
        return f"Hello, I want to return the {' and the '.join(self._request.items)} from an order."

    def answer(self, text: str) -> str | None:
        """The reply to what the agent said; None when the customer leaves."""
        self._answers += 1
        if "?" not in text or self._answers > PATIENCE:
            return None
        asked = text.lower()
        said = []
        if "mail" in asked:
            said.append(f"My e-mail is {self._request.email}.")
        if "order" in asked or "number" in asked:
            said.append(f"The order is {self._request.order}.")
        return " ".join(said) or "Yes."
