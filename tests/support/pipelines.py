"""What texts of ranks share that put a model under pp."""

from tests.support.parity import TEXT

# Behind torch_ranks.PRELUDE.
PP = (
    TEXT
    + """
import warnings
from nbdist.parallel import options, precision, transform as steps
from nbdist.parallel.dp import fsdp
from nbdist.parallel.pp import partition as pp
warnings.simplefilter("ignore")

def put(base, degrees=None, accelerator=None, **settings):
    job = job_of(base, choose("pp", degrees or {"pp": n}, **settings))
    job.accelerator = accelerator
    axes = {"tp": job.grid.degrees.tp, "fsdp": job.grid.degrees.dp_shard}
    wanted = ("pp", "tp", "options", "fsdp", "precision", "pipeline")
    return put_under(job, *steps.load(name for name in wanted if axes.get(name) != 1))

def gathered(outer, base, what):
    "Every rank's own tensors as one model's; those that several hold are equal."
    own = {name: whole(what(p)) for name, p in base.named_parameters()
           if not p.is_meta and what(p) is not None}
    everyone = [None] * n
    dist.all_gather_object(everyone, own)
    found = {}
    for gathered_parts in everyone:
        for name, tensor in gathered_parts.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return {name: found[name] for name, _ in base.named_parameters() if name in found}

def pp_gradients(outer, base):
    return gathered(outer, base, lambda p: p.grad)

def pp_parameters(outer, base):
    return gathered(outer, base, lambda p: p)

def tokens(step, size=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (size, 6), generator=generator)

def follow(outer, base, loss_of, gradients):
    "Loss and gradients of three steps of AdamW."
    found = []
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-3)
    for step in range(3):
        loss = loss_of(outer, step)
        loss.backward()
        found.append((loss.item(), gradients(outer, base)))
        optimizer.step()
        optimizer.zero_grad()
    return found

def gaps(found, wanted):
    "Differences of losses and of gradients, step by step."
    differences = []
    for (loss, own), (other_loss, other) in zip(found, wanted):
        assert own.keys() == other.keys(), own.keys() ^ other.keys()
        differences.append(abs(loss - other_loss))
        differences += [(own[name] - other[name]).abs().max().item() for name in own]
    return differences

def compare(degrees=None, how=lambda model: model, made=None, accumulate=1, **settings):
    "Largest differences of losses, gradients and parameters from one process with all data."
    wanted = train(*[how(make(**(made or {})))] * 2, accumulate=accumulate)
    base = how(make(**(made or {})))
    outer = put(base, degrees, **settings)
    found = train(outer, base, accumulate=accumulate,
                  gradients=pp_gradients, parameters=pp_parameters)
    return off(found, wanted)

class Plain(nn.Module):
    "Each parameter is used once, so zero bubble can run its backward in two halves."
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 23), nn.GELU(), nn.Linear(23, WIDTH))
    def forward(self, x):
        h = self.mix(self.norm(x))
        return x + self.mlp(x + h.cumsum(1) / h.shape[1])

def plain(model):
    torch.manual_seed(3)
    for position in range(len(model.layers)):
        model.layers[position] = Plain()
    return model

def own_bias(model):
    model.head.bias = nn.Parameter(torch.zeros(WORDS))
    return model

def freeze(model):
    model.words.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model
"""
)
