"""What ranks run: each case's model under its strategy by nbdist's own steps, measured."""

RANKS = """
import json, os
import torch.nn.functional as F
from torch import nn
from nbdist.strategy.choice import steps_of
from nbdist.strategy.choose import choose
from nbdist.planner.rank import describe_model, measure_step as measured
from nbdist.planner.fake import pickle_by_value
from nbdist.planner.fake.models import PickledModel
from nbdist.parallel import prepare, registry
from nbdist.parallel.ep import tokens as routed

class Mlp(nn.Module):
    def __init__(self, width=256, depth=4):
        super().__init__()
        self.inner = nn.Linear(32, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(depth))
        self.head = nn.Linear(width, 11)
    def forward(self, x):
        x = self.inner(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

class Cnn(nn.Module):
    def __init__(self, channels=32, depth=3):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1),
                                                  nn.BatchNorm2d(channels), nn.ReLU())
                                    for _ in range(depth))
        self.head = nn.Linear(channels, 10)
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))

def vit():
    from transformers import ViTConfig, ViTForImageClassification
    config = ViTConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
                       intermediate_size=512, image_size=64, patch_size=8, num_labels=10,
                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return ViTForImageClassification(config)

def made(case):
    torch.manual_seed(0)
    if case["config"]:
        from transformers import AutoConfig, AutoModelForCausalLM
        config = AutoConfig.for_model(**case["config"])
        tokens = torch.randint(0, 500, (case["batch"], case["sequence"]))
        if case["name"] in ("cp", "ulysses"):
            kwargs = {"input_ids": tokens, "use_cache": False, "shift_labels": tokens,
                      "labels": tokens}
        else:
            kwargs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        return AutoModelForCausalLM.from_config(config), (), kwargs
    if case["model"] == "mlp":
        return Mlp(), (torch.randn(64 * case["batch"], 32),), {}
    if case["model"] == "cnn":
        return Cnn(), (torch.randn(case["batch"], 3, 32, 32),), {}
    return vit(), (), {"pixel_values": torch.randn(case["batch"], 3, 64, 64)}

found = []
for case in json.loads(os.environ["CASES"]):
    try:
        model, args, kwargs = made(case)
        registry.set_choice(choose(case["name"], case["given"], n))
        pickled = pickle_by_value.dumps(PickledModel(model, args, kwargs))
        sent = "" if case["config"] else pickled.hex()
        routed.forget()
        outer = prepare.prepare_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        prepare.bind(optimizer)
        one = measured.measure_step(measured.StepSubject(outer, model, optimizer, args, kwargs))
        seen = {k: getattr(one, k) for k in one.__slots__}
        found.append({"sent": sent, "load": routed.load() or 1.0, **seen})
        del outer, model, optimizer, one
    except Exception as error:
        import traceback
        found.append(traceback.format_exc())
done(found=found)
"""
