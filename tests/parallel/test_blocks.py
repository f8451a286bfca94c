"""Which list of a model is its blocks."""

import pytest
import torch
from torch import nn

from nbdist.errors import OptionError
from nbdist.parallel.base.blocks import candidates, find_blocks


class Block(nn.Module):
    def __init__(self, width: int = 8, experts: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))


class Towers(nn.Module):
    def __init__(self, left: int, right: int) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block() for _ in range(left))
        self.right = nn.Sequential(*(Block() for _ in range(right)))
        self.drops = nn.ModuleList(nn.Dropout() for _ in range(9))


def test_the_largest_list_of_like_modules_is_found() -> None:
    """Lists in its blocks, lists of lists and lists without parameters do not count."""
    model = nn.Module()
    model.body = nn.Module()
    model.body.layers = nn.ModuleList(Block(experts=4) for _ in range(3))
    model.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])
    model.grid = nn.ModuleList(nn.ModuleList([nn.Linear(99, 99), nn.ReLU()]) for _ in range(2))

    blocks = find_blocks(model)

    assert blocks.name == "body.layers"
    assert blocks.container is model.body.layers
    assert blocks.modules == tuple(model.body.layers)
    assert blocks.block_name(2) == "body.layers.2"
    assert find_blocks(model, "heads").modules == tuple(model.heads)


def test_a_model_can_be_the_list_itself() -> None:
    """By itself where its layers are alike, by the name "." where they are not."""
    alike = nn.Sequential(Block(), Block())
    mixed = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    assert find_blocks(alike).container is alike
    assert find_blocks(alike).block_name(1) == "1"
    assert len(find_blocks(mixed, ".").modules) == 3
    with pytest.raises(OptionError, match=r"no list of blocks.*--blocks NAME.*\. \(3 x Linear and"):
        find_blocks(mixed)


def test_layers_of_several_classes_with_one_base_are_alike() -> None:
    """As in models of which some layers have attention; torch's own classes have nothing alike."""

    class Convolution(Block):
        pass

    class Attention(Block):
        pass

    layers = nn.Sequential(Convolution(), Attention(), Convolution())

    assert find_blocks(nn.ModuleDict({"layers": layers})).container is layers
    assert not candidates(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))


def test_two_largest_lists_are_named() -> None:
    """Nothing is guessed where two lists are alike; one parameter more decides."""
    with pytest.raises(OptionError, match=r"2 lists.*left \(2 x Block\), right \(2 x Block\)"):
        find_blocks(Towers(2, 2))

    assert find_blocks(Towers(2, 3)).name == "right"
    assert find_blocks(Towers(2, 2), "left").name == "left"


@pytest.mark.parametrize("name", ["nowhere", "left.0", "left.0.up"])
def test_a_name_that_is_no_list_is_refused_with_the_lists(name: str) -> None:
    """The message holds what can be named."""
    with pytest.raises(OptionError, match=r"left \(2 x Block\), right \(1 x Block\), drops"):
        find_blocks(Towers(2, 1), name)


def test_a_model_without_lists_says_so() -> None:
    """There is nothing that could be named."""
    with pytest.raises(OptionError, match="no lists at all"):
        find_blocks(nn.Linear(2, 2))


def test_meta_parameters_and_shared_blocks_count_as_they_are() -> None:
    """Sizes come from shapes; a block that stands in the list twice has its parameters once."""
    with torch.device("meta"):
        model = Towers(2, 3)
    shared = Block()
    twice = nn.Module()
    twice.many = nn.ModuleList([shared, shared, shared])
    twice.two = nn.ModuleList([Block(), Block()])

    assert find_blocks(model).name == "right"
    assert find_blocks(twice).name == "two"
    assert [blocks.name for blocks in candidates(twice)] == ["many", "two"]
