"""What ranks run: a small model, how it is prepared, and a step that is verified."""

SETUP = """
    from nbdist.strategy.choose import choose
    from nbdist.parallel import registry
    from nbdist.parallel.accelerator.accelerator import Accelerator
    from nbdist.verification.rank.verify import verify
    from nbdist.verification.verdict import StepRequest
    from nbdist.verification.differences import PHASES
    from tests.programs.experts import Experts as StackedExperts
    import gc
    import torch.nn.functional as F
    gc.collect(); gc.freeze()  # what torch brings is not looked at again and again

    class Attention(torch.nn.Module):
        def __init__(self, size, heads, drop):
            super().__init__()
            self.n_heads, self.head_dim, self.drop = heads, size // heads, drop
            self.q_proj = torch.nn.Linear(size, size)
            self.k_proj = torch.nn.Linear(size, size)
            self.v_proj = torch.nn.Linear(size, size)
            self.o_proj = torch.nn.Linear(size, size)
        def forward(self, x):
            q, k, v = (
                layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for layer in (self.q_proj, self.k_proj, self.v_proj))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(y.transpose(1, 2).flatten(-2))
    class Block(torch.nn.Module):
        def __init__(self, size=16, heads=4, drop=0.0):
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(size), torch.nn.LayerNorm(size)
            self.attention = Attention(size, heads, drop)
            self.up, self.down = torch.nn.Linear(size, 4 * size), torch.nn.Linear(4 * size, size)
            self.dropout = torch.nn.Dropout(drop)
        def forward(self, x):
            x = x + self.dropout(self.attention(self.norm1(x)))
            return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
    class Net(torch.nn.Module):
        def __init__(self, size=16, words=24, drop=0.0):
            super().__init__()
            self.words = words
            self.embed = torch.nn.Embedding(words, size)
            self.places = torch.nn.Embedding(32, size)
            self.blocks = torch.nn.ModuleList(Block(size, drop=drop) for _ in range(2))
            self.norm = torch.nn.LayerNorm(size)
            self.head = torch.nn.Linear(size, words, bias=False)
        def forward(self, tokens, position_ids=None):
            if position_ids is None:
                position_ids = torch.arange(tokens.shape[1])[None]
            x = self.embed(tokens) + self.places(position_ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    class Mixture(torch.nn.Module):
        def __init__(self, size=16):
            super().__init__()
            self.router, self.experts = torch.nn.Linear(size, 8), StackedExperts(size, 20)
        def forward(self, h):
            x = h.flatten(0, 1)
            weights, which = self.router(x).softmax(-1).topk(2)
            weights = weights / weights.sum(-1, keepdim=True)
            return self.experts(x, which, weights).view_as(h)
    class MixedNet(Net):
        ep_plan = {"blocks.*.down.experts": "experts"}
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.up, block.down = torch.nn.Identity(), Mixture()
    def shares_experts():
        return registry.current().degrees.ep > 1

    def start(name, kind=Net, lr=1e-2, **options):
        model_options = {k: options.pop(k) for k in list(options) if k in ("drop", "size", "words")}
        registry.set_choice(choose(name, options, n, device_type="cpu", backend="gloo"))
        torch.manual_seed(0)
        global accelerator, model, optimizer, loader
        accelerator = Accelerator()
        model = kind(**model_options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        data = torch.randint(24, (64, 17), generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 4, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        torch.manual_seed(rank)
    def loss_of(logits, tokens):
        return F.cross_entropy(logits.reshape(-1, 24), tokens.reshape(-1))
    class WithLoss(Net):
        def forward(self, tokens, labels=None):
            logits = super().forward(tokens)
            return logits if labels is None else F.cross_entropy(
                logits.reshape(-1, self.words), labels.reshape(-1))
    class WithBatchNorm(Net):
        def __init__(self, **options):
            super().__init__(**options)
            self.norm = torch.nn.Sequential(torch.nn.BatchNorm1d(16))
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
    class Experts(torch.nn.Module):
        "Tokens go to one expert each, sorted as transformers sorts them."
        def __init__(self, size=16, n_experts=3):
            super().__init__()
            self.gate = torch.nn.Linear(size, n_experts)
            self.up = torch.nn.Parameter(torch.randn(n_experts, size, size) / 4)
            self.act = torch.nn.GELU()
            self.down = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(n_experts))
        def forward(self, x):
            rows = x.flatten(0, -2)
            weight, expert = self.gate(rows).softmax(-1).max(-1)
            order = expert.argsort(stable=True)
            up = torch.einsum("ns,nst->nt", rows[order], self.up[expert[order]])
            parts = self.act(up).split(expert.bincount(minlength=len(self.down)).tolist())
            out = torch.cat([down(part) for down, part in zip(self.down, parts)])
            return (out[order.argsort()] * weight[:, None]).view_as(x)
    class WithExperts(Net):
        def __init__(self, **options):
            super().__init__(**options)
            for block in self.blocks:
                block.up, block.down = Experts(), torch.nn.Identity()
    class Sorted(Net):
        def forward(self, tokens):
            order = tokens[:, 0].argsort(stable=True)
            return super().forward(tokens[order])[order.argsort()]
    class Tied(Net):
        def __init__(self, **options):
            super().__init__(**options)
            self.head.weight = self.embed.weight
    class WithAverage(Net):
        def __init__(self, **options):
            super().__init__(**options)
            self.average = torch.nn.Linear(16, 24, bias=False)
            self.average.load_state_dict(self.head.state_dict())
            self.average.requires_grad_(False)
        def pairs(self):
            return [(self.average.weight, self.head.weight)]

    def step(clip=True, call=None, after_step=None, after_backward=None, batch=None, backward=None,
             ignore=0, in_no_sync=False, loss=None, n_steps=None):
        global accelerator, model, optimizer, loader
        n_steps = n_steps or accelerator.gradient_accumulation_steps
        batches = [batch()] if batch else (b for (b,), _ in zip(loader, range(n_steps)))
        for tokens in batches:
            labels = tokens[:, 1:].clone()
            labels[:, :ignore] = -100
            held = accelerator.no_sync(model) if in_no_sync else accelerator.accumulate(model)
            with held:
                if isinstance(unwrapped(), WithLoss):
                    value = model(tokens[:, :-1], labels)
                else:
                    value = (loss or loss_of)((call or model)(tokens[:, :-1]), labels)
                (backward or accelerator.backward)(value)
                if after_backward:
                    after_backward()
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                if after_step:
                    after_step()
    def unwrapped():
        return accelerator.unwrap_model(model)
    def verified(**options):
        globals()["planted"] = options
        return verify(StepRequest(code="step(**planted)"))
    def verified_with(name, change, **options):
        "With another function of the experts' exchange in the place of one."
        from nbdist.parallel.ep import dispatch
        start("ep", kind=MixedNet, **options)
        right = getattr(dispatch, name)
        setattr(dispatch, name, change(right))
        try:
            return verified()
        finally:
            setattr(dispatch, name, right)
    def reset():
        global accelerator, model, optimizer, loader, planted
        model = optimizer = loader = accelerator = planted = None
        gc.collect()
    def state():
        "All that must be as it was, as one text."
        from nbdist.parallel.tensors import digest, local_of
        prepared = registry.prepared()[0]
        tensors = [local_of(p) for p in prepared.parameters.values() if not p.is_meta]
        raw = getattr(optimizer, "optimizer", optimizer)
        moments = [local_of(v) for s in raw.state.values() for v in s.values()
                   if isinstance(v, torch.Tensor)]
        drawn = torch.random.get_rng_state().sum()
        return f"{digest(tensors)} {digest(moments)} {drawn} {registry.current()}"
    def shown(v):
        worst = {}
        for row in v.rows:
            share = max(row.errors.values())
            if share >= worst.get(row.key.what, (0, ""))[0]:
                worst[row.key.what] = (share, row.key.name, row.relative, row.allowed)
        first = v.first and [v.first.key.what, v.first.key.name, v.first.key.call, v.first.relative,
                 v.first.allowed, v.first.worst.factor, list(v.first.outside)]
        return dict(first=first, module=v.place.module, line=v.place.line and v.place.line.source,
                    kind=v.kind, worst=worst, n=len(v.rows),
                    not_compared=dict(v.not_compared), findings=[f.found for f in v.findings],
                    n_steps=v.n_steps, step_s=v.step_s, reference_s=v.reference_s)
"""
