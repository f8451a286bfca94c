"""transformers' auxiliary loss of a mixture of experts, which it computes of all router logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FLAG = "output_router_logits"
WITHOUT = (
    f"Leave it out (config.{_FLAG} = False) and train the router by the model's loss alone, or "
    "use ddp, fsdp or ep"
)


def are_asked(config: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of a model with this config returns router logits and the loss of them."""
    if (asked := arguments.get(_FLAG)) is not None:
        return bool(asked)
    return any(
        getattr(each, _FLAG, False) for each in (config, getattr(config, "text_config", None))
    )
