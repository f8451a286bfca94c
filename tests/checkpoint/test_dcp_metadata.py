"""`.metadata` names what torch's writer names, as any Python writes it, and nothing else."""

import os
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as Tensor

from nbdist.checkpoint.rank import dcp_metadata
from nbdist.errors import CheckpointError


class Looked:
    """Written as getattr(kind, name), as Python before 3.11.4 writes a member of an enum."""

    def __init__(self, kind: Any, name: str) -> None:
        self.call = getattr, (kind, name)

    def __reduce__(self) -> Any:
        return self.call


def test_a_member_of_an_enum_is_read_however_it_is_written() -> None:
    """By its value, and by its name: checkpoints travel between Pythons."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    tensor = Tensor(Properties(), torch.Size([2]), [chunk])
    by_value = dcp_metadata.loads(pickle.dumps(Metadata({"w": tensor})))
    formats: Any = metadata._MEM_FORMAT_ENCODING
    looked = Looked(formats, "TORCH_CHANNELS_LAST")
    by_name = dcp_metadata.loads(pickle.dumps(Metadata({"w": looked})))  # type: ignore[dict-item]

    assert by_value.state_dict_metadata == {"w": tensor}
    assert by_name.state_dict_metadata == {"w": formats.TORCH_CHANNELS_LAST}


@pytest.mark.parametrize(
    ("kind", "name"), [(Metadata, "__init__"), (Properties, "__globals__"), (torch.Size, "numel")]
)
def test_nothing_else_is_looked_up(kind: Any, name: str) -> None:
    """Attributes of classes that may stand there would lead anywhere."""
    bad = pickle.dumps(Metadata({"w": Looked(kind, name)}))  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=f"asks .* for '{name}'"):
        dcp_metadata.loads(bad)


def test_functions_are_not_called() -> None:
    """They are named in the error."""

    class Bad:
        def __reduce__(self) -> Any:
            return os.system, ("exit 1",)

    with pytest.raises(CheckpointError, match=r"refers to posix\.system"):
        dcp_metadata.loads(pickle.dumps(Bad()))
