"""Multi-step arithmetic with a calculator tool."""

from agentrl.envs.calculator.env import Calculator
from agentrl.envs.calculator.expression import CalculatorError, evaluate

__all__ = ["Calculator", "CalculatorError", "evaluate"]
