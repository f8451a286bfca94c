"""What ranks that split a sequence begin with: a model, its training, and the same by itself."""

COMMON = """
    import contextlib, itertools
    import torch.nn.functional as F
    from nbdist.strategy.choice import Strategy, Degrees, Options
    from nbdist.parallel import precision
    from nbdist.parallel.cp import attention, cp, check, split_sequence
    from nbdist.parallel.options import STEP as OPTIONS_STEP
    from nbdist.parallel.mesh import build_mesh
    from nbdist.parallel.cp.kernels import Problem
    from nbdist.parallel.transform import ModelBuild

    class Attention(torch.nn.Module):
        "Four heads of queries, two of keys and values."
        def __init__(self, dropout=0.0):
            super().__init__()
            self.q, self.kv = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
            self.out, self.dropout = torch.nn.Linear(32, 32), dropout
        def forward(self, x):
            b, t, _ = x.shape
            q = self.q(x).view(b, t, 4, 8).transpose(1, 2)
            k, v = self.kv(x).view(b, t, 4, 8).transpose(1, 2).chunk(2, 1)
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True, dropout_p=self.dropout)
            return self.out(y.transpose(1, 2).reshape(b, t, -1))

    class Block(torch.nn.Module):
        def __init__(self, dropout=0.0):
            super().__init__()
            self.norm, self.attention = torch.nn.LayerNorm(32), Attention(dropout)
            self.mlp = torch.nn.Sequential(
                torch.nn.LayerNorm(32), torch.nn.Linear(32, 64), torch.nn.GELU(),
                torch.nn.Linear(64, 32))
        def forward(self, x):
            x = x + self.attention(self.norm(x))
            return x + self.mlp(x)

    class Model(torch.nn.Module):
        "Returns the loss; logits without targets. Learned positions, given or counted."
        def __init__(self, dropout=0.0):
            super().__init__()
            self.tokens = torch.nn.Embedding(64, 32)
            self.positions = torch.nn.Embedding(64, 32)
            self.blocks = torch.nn.ModuleList([Block(dropout) for _ in range(2)])
            self.head = torch.nn.Linear(32, 64)
        def forward(self, x, y=None, position_ids=None):
            if position_ids is None:
                position_ids = torch.arange(x.shape[1]).unsqueeze(0)
            h = self.tokens(x) + self.positions(position_ids)
            for block in self.blocks:
                h = block(h)
            logits = self.head(h)
            return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def batch(step, ignored=()):
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randint(0, 64, (4, 25), generator=generator)
        y = x[:, 1:].clone()
        for row, start, stop in ignored:
            y[row, start:stop] = -100
        return x[:, :-1].contiguous(), y

    def make(build):
        torch.manual_seed(0)
        return build()

    def split(base, context="ring", plan_only=False, **options):
        choice = Strategy("cp", Degrees(cp=n), n, Options(context=context, **options))
        job = ModelBuild(base, choice, build_mesh(choice, "cpu"), torch.device("cpu"))
        cp.STEP.plan(job, {})
        if plan_only:
            return None
        OPTIONS_STEP.plan(job, {})
        OPTIONS_STEP.lay_out(job)
        precision.STEP.wrap(job, base)
        ddp = DDP(base, process_group=job.grid.group("dp_replicate", "cp"))
        return cp.STEP.wrap(job, ddp)

    def trained(model, loss_of, steps=2):
        "Losses and, of the first step, gradients."
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses, grads = [], {}
        for step in range(steps):
            loss = loss_of(model, step)
            loss.backward()
            if not step:
                grads = {k.replace("module.", ""): p.grad.clone()
                         for k, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().float()
            dist.all_reduce(mean)
            losses.append(mean.item() / n)
        return losses, grads

    def apart(build, loss_of, **kwargs):
        "Greatest difference of losses, and of gradients, to the model by itself."
        is_half = kwargs.get("precision") == "bf16"
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            alone, alone_grads = trained(make(build), loss_of)
        losses, grads = trained(split(make(build), **kwargs), loss_of)
        assert grads.keys() == alone_grads.keys(), (grads.keys(), alone_grads.keys())
        return [max(abs(a - b) for a, b in zip(losses, alone)),
                max((grads[k] - alone_grads[k]).abs().max().item() for k in grads)]
"""
