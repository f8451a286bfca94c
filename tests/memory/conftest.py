"""The fixture that tests here share."""

from tests.support.heap import frozen

__all__ = ["frozen"]
