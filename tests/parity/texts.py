"""What ranks run to be compared with one process: models, one cell for all, the comparison."""

from tests.support.training import MODEL

# Behind MODEL. Everything whole is gathered beside the cell, whose lines a user could have typed.
COMMON = """
    import copy, functools
    from torch.distributed.fsdp import FullyShardedDataParallel
    from nbdist.parallel.dp import fsdp1_state
    from nbdist.parallel.reshard import full_state as wholes
    from nbdist.switch.rank import switch
    from nbdist.parallel.reshard.redistribute import Reshard, redistribute
    from nbdist.parallel.tensors import local_as
    from tests.programs.experts import Experts
    from tests.programs.optimizers import Muon

    LENGTH, GLOBAL, LIMIT = 16, 16, 0.5
    DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
    DEVICE = registry.device()

    class Plain(Net):
        def __init__(self, n_blocks=int(os.environ.get("BLOCKS", 4))):
            super().__init__(n_blocks=n_blocks, n_heads=8)
            self.norm = nn.LayerNorm(16)

    def plain():
        return Plain(int(os.environ.get("BLOCKS", max(4, min(2 * n, 8)))))

    def llama(n_blocks=max(4, n)):
        from transformers import LlamaConfig, LlamaForCausalLM
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=n_blocks,
            num_attention_heads=8, num_key_value_heads=max(2, n), max_position_embeddings=32))

    def gpt2():
        from transformers import GPT2Config, GPT2LMHeadModel
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=24, n_embd=16, n_layer=max(4, n), n_head=8, n_positions=32,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))

    def adapted(net, *layers, **options):
        "Its adapters alone are trained; B is no zero, so that A has gradients at once."
        from peft import LoraConfig, get_peft_model
        return get_peft_model(net, LoraConfig(
            r=4, target_modules=list(layers), init_lora_weights=False, **options))

    def lora():
        return adapted(llama(), "q_proj", "v_proj")

    def lora_everywhere():
        "On layers that tp splits by outputs and by inputs, the vocabulary's too; named arguments."
        return adapted(llama(2), "q_proj", "v_proj", "o_proj", "gate_proj", "down_proj",
                       "lm_head", "embed_tokens", task_type="CAUSAL_LM")

    class Mixture(nn.Module):
        def __init__(self, width, count=8):
            super().__init__()
            self.router, self.experts = nn.Linear(width, count), Experts(width, 2 * width, count)
        def forward(self, h):
            x = h.flatten(0, 1)
            weights, which = self.router(x).float().softmax(-1).topk(2)
            return self.experts(x, which, weights).view_as(h)

    def experts():
        net = plain()
        for block in net.blocks:
            block.mlp = Mixture(16)
        net.ep_plan = {"blocks.*.mlp.experts": "experts"}
        return net

    def mixtral(n_blocks=max(4, n), n_heads=max(2, n)):
        from transformers import MixtralConfig, MixtralForCausalLM
        return MixtralForCausalLM(MixtralConfig(
            vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=n_blocks,
            num_attention_heads=8, num_key_value_heads=n_heads, num_local_experts=8,
            num_experts_per_tok=2, max_position_embeddings=32))

    MODELS = {"plain": plain, "llama": llama, "gpt2": gpt2, "lora": lora, "experts": experts,
              "mixtral": mixtral,
              "lora everywhere": lora_everywhere,
              "lora of gpt2": lambda: adapted(gpt2(), "c_attn", "c_proj", fan_in_fan_out=True)}

    def made(model, seed, rate=lambda step: 0.9 ** step, is_alone=False):
        "A model, or `a model by Muon`, with its optimizer and schedule."
        torch.manual_seed(seed)
        kind, _, by = model.partition(" by ")
        net = MODELS[kind]()
        if is_alone:
            net.to(DEVICE)
        # Adam makes whole steps of rounding errors where a gradient is 0, as that of a key's bias
        # always is. A larger eps lets them be as small in the parameters as they are.
        optimizer = (Muon(groups(net), lr=2e-3) if by == "Muon" else
                     torch.optim.AdamW(groups(net), lr=2e-3, eps=1e-4))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return net, optimizer, scheduler

    def rate(step):
        "Always another one, and never small: a lost step of a moment or a rate is to be seen."
        return 0.75 + 0.25 * (-1) ** step / (1 + step % 5)

    def step_alone(net, optimizer, scheduler, batches):
        "A step of one process; its loss, and the rates after it."
        x, y = (tensor.to(DEVICE) for tensor in next(batches))
        loss = loss_of(net(x, labels=y))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item(), scheduler.get_last_lr()

    def moments_off(optimizer, moments):
        "The largest difference of each kind of state, by its largest value; steps are equal."
        state = wholes.full_optimizer_state(optimizer.optimizer)["state"]
        def worst(kind):
            pairs = [(torch.as_tensor(state[name][kind]).cpu(), torch.as_tensor(wanted[kind]).cpu())
                     for name, wanted in moments.items() if kind in wanted]
            size = max(wanted.abs().max().item() for _, wanted in pairs)
            return max((value - wanted).abs().max().item() for value, wanted in pairs) / size
        kinds = {kind for wanted in moments.values() for kind in wanted}
        assert worst("step") == 0
        return max(worst(kind) for kind in kinds - {"step"})

    def samples(count):
        "A label for each word, other ones every 12 batches: there is always much to be learned."
        drawn = torch.Generator().manual_seed(11)
        words = torch.randint(24, (count, GLOBAL, LENGTH), generator=drawn)
        labels = [torch.randperm(24, generator=drawn)[part] for part in words.split(12)]
        return TensorDataset(words.flatten(0, 1), torch.cat(labels).flatten(0, 1))

    def loss_of(output):
        return output if isinstance(output, torch.Tensor) else output.loss

    def read(text):
        "What stands behind %dist_strategy, as a Choice."
        name, *flags = text.split(" --")
        given = {}
        for flag in flags:
            word, _, value = flag.partition(" ")
            given[word.replace("-", "_")] = (float(value) if word == "bucket" else value) or True
        return choose(name, given, n, device_type=DEVICE.type, backend=this_rank().topology.backend)

    def whole_gradients(model):
        "By first name, on every rank. Collective."
        one = registry.prepared_of(model)
        if one is None:
            return {}  # DeepSpeed has them in buffers of its own
        if fsdp1_state.is_flat(one):
            with FullyShardedDataParallel.summon_full_params(
                    one.outer, writeback=False, with_grads=True):
                return {name: p.grad.clone() for name, p in one.parameters.items()
                        if p.requires_grad}
        held = {name: local_as(p.grad, p) for name, p in one.parameters.items()
                if p.grad is not None}
        moves = [Reshard(name, torch.float32, one.side(name), one.whole(name))
                 for name, p in one.parameters.items() if p.requires_grad]
        home = next((grad.device for grad in held.values()), DEVICE)  # the host's if offloaded
        new = redistribute(moves, held, home)
        return {name: g.clone() for name, g in new.items()}

    def far(found, wanted):
        "The largest difference of tensors by name; the first name of a tied one is enough."
        wanted = {name: wanted[name] for name in found}
        return max((found[name].to(DEVICE) - wanted[name].to(DEVICE)).abs().max().item()
                   for name in wanted)
"""

# Every case is the same cell. Whatever it does is in `Found`, and compared step by step.
ROWS = (
    MODEL
    + COMMON
    + """
    STEPS = int(os.environ["STEPS"])

    class Found:
        def __init__(self):
            self.losses, self.norms, self.rates = [], [], []
            self.gradients, self.parameters = [], None

    @functools.cache
    def alone(model, k, precision):
        "Plain torch: whole batches, k of them for a step."
        net, optimizer, scheduler = made(model, 0, is_alone=True)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, enabled=precision == "fp16")
        half = torch.autocast(DEVICE.type, DTYPES.get(precision), enabled=precision in DTYPES)
        loader, found = DataLoader(samples(STEPS * k), batch_size=GLOBAL), Found()
        for at, (x, y) in enumerate(loader):
            with half:
                loss = loss_of(net(x.to(DEVICE), labels=y.to(DEVICE)))
            scaler.scale(loss / k).backward()
            found.losses.append(loss.item())
            if (at + 1) % k == 0:
                scaler.unscale_(optimizer)
                found.norms.append(nn.utils.clip_grad_norm_(net.parameters(), LIMIT).item())
                found.gradients.append({m: p.grad.clone() for m, p in net.named_parameters()
                                        if p.requires_grad})
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
                found.rates.append(scheduler.get_last_lr()[0])
        found.parameters = {m: t.detach().clone() for m, t in net.state_dict().items()}
        return found

    def cell(accelerator, kind, k):
        "Plain Accelerate, the same under every strategy."
        found = Found()
        net, optimizer, scheduler = made(kind, rank + 1 if rank else 0)
        loader = DataLoader(samples(STEPS * k), batch_size=GLOBAL)
        model, optimizer, scheduler, loader = accelerator.prepare(
            net, optimizer, scheduler, loader)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model(x, labels=y))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), LIMIT)
                    found.norms.append(norm.item())
                    found.gradients.append(whole_gradients(model))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    found.rates.append(scheduler.get_last_lr()[0])
            found.losses.append(accelerator.reduce(loss.detach(), "mean").item())
        found.parameters = accelerator.get_state_dict(model)
        return found

    def apart(found, wanted):
        pairs = [(found.losses, wanted.losses), (found.norms, wanted.norms),
                 (found.rates, wanted.rates)]
        loss, norm, rate = (max(abs(a - b) for a, b in zip(x, y, strict=True)) for x, y in pairs)
        assert found.parameters.keys() <= wanted.parameters.keys()
        looked = [far(a, b) for a, b in zip(found.gradients, wanted.gradients, strict=True) if a]
        return {"loss": loss, "norm": norm, "rate": rate, "gradients": max(looked, default=None),
                "parameters": far(found.parameters, wanted.parameters)}

    def compare(typed, kind):
        choice = read(typed)
        options = choice.options
        switch.switch(choice)
        found = cell(accelerator, kind, options.accumulate)
        return apart(found, alone(kind, options.accumulate, options.precision))

    use("ddp")
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    found = []
    for typed, kind in json.loads(os.environ["CASES"]):
        began_s = time.perf_counter()
        found.append(tried(compare, typed, kind))
        if isinstance(found[-1], str):
            done(found=found)
        gc.collect()
        assert registry.prepared() == []
        print(typed, kind, found[-1], f"{time.perf_counter() - began_s:.2f} s", flush=True)
    left = [*accelerator._models, *accelerator._optimizers, *accelerator._schedulers,
            *accelerator._dataloaders]
    # DeepSpeed's engines live on by themselves.
    assert typed.startswith("deepspeed") or not left, left
    done(found=found)
"""
)

# One loop over the data, its strategy changed under it again and again.
SWITCHES = (
    MODEL
    + COMMON
    + """
    PATH, EACH = json.loads(os.environ["SWITCHED"]), int(os.environ.get("EACH", 3))
    KIND = os.environ.get("KIND", "plain")
    data = samples(EACH * len(PATH))

    alone = *made(KIND, 0, rate, is_alone=True), iter(DataLoader(data, batch_size=GLOBAL))

    switch.switch(read(PATH[0]))
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    model, optimizer, scheduler = made(KIND, rank + 1 if rank else 0, rate)
    loader = DataLoader(data, batch_size=GLOBAL)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    batches = iter(loader)
    def step():  # a closure, made once, over what keeps its identity
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    def train():
        x, y = next(batches)
        with accelerator.accumulate(model):
            loss = loss_of(model(x, labels=y))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            step()
        return accelerator.reduce(loss.detach(), "mean").item(), scheduler.get_last_lr()

    def identities():
        raw = optimizer.optimizer
        return [id(one) for one in (
            optimizer, raw, raw.param_groups, *raw.param_groups,
            *(group["params"] for group in raw.param_groups), scheduler, loader, batches)]

    def compare():
        loss = 0.0
        for _ in range(EACH):
            (found, found_rate), (wanted, wanted_rate) = train(), step_alone(*alone)
            assert found_rate == wanted_rate, (found_rate, wanted_rate)
            loss = max(loss, abs(found - wanted))
        net, state = alone[0], alone[1].state
        moments = {name: state[p] for name, p in net.named_parameters() if p.requires_grad}
        return {"loss": loss, "moments": moments_off(optimizer, moments),
                "parameters": far(accelerator.get_state_dict(model), net.state_dict())}

    def go(after):
        began_s = time.perf_counter()
        told = switch.switch(read(after))
        took_s = time.perf_counter() - began_s
        assert not told.stale and kept == identities(), told
        found = compare()
        print(after, found, f"{took_s:.2f} s", f"{time.perf_counter() - began_s:.2f} s", flush=True)
        return found

    compare()
    kept, found = identities(), []
    for after in PATH[1:]:
        found.append(tried(go, after))
        if isinstance(found[-1], str):
            break
    done(found=found)
"""
)
