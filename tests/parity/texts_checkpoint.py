"""What ranks run that save a checkpoint in the middle of training, or go on from one."""

from tests.parity.texts import COMMON
from tests.support.training import MODEL

# Behind TorchRanks' prelude. Losses are those of one process that was never interrupted.
CHECKPOINTS = (
    MODEL
    + COMMON
    + """
    from nbdist.checkpoint.results import DONE
    from nbdist.checkpoint.rank import jobs, load, save

    folder, EPOCH, BEFORE, AFTER = Path(os.environ["FOLDER"]), 2, 3, 3
    KIND = os.environ["KIND"]
    # The same on any number of ranks: the other texts' models grow with them.
    MODELS |= {"plain": Plain, "mixtral": lambda: mixtral(n_blocks=2, n_heads=2)}

    def shuffled(seed):
        order = torch.Generator().manual_seed(seed)
        return DataLoader(samples(EPOCH), batch_size=GLOBAL, shuffle=True, generator=order)

    def endless(loader):
        "The batches of one epoch after the other."
        while True:
            yield from loader

    def states(net, optimizer):
        "Whole parameters and moments, by name."
        state = {name: optimizer.state[p] for name, p in net.named_parameters()}
        return copy.deepcopy((net.state_dict(), state))

    @functools.cache
    def alone():
        "One process from beginning to end: losses, rates, and what there is after each part."
        net, optimizer, scheduler = made(KIND, 0, rate, is_alone=True)
        batches, steps, kept = endless(shuffled(0)), [], []
        for at in range(BEFORE + AFTER):
            steps.append(step_alone(net, optimizer, scheduler, batches))
            if at + 1 in (BEFORE, BEFORE + AFTER):
                kept.append(states(net, optimizer))
        return *zip(*steps), kept

    def train(parts, batches, first, count):
        "Steps, compared with those of one process; then parameters and moments."
        model, optimizer, scheduler, _ = parts
        losses, rates, kept = alone()
        far_off = 0.0
        for at in range(first, first + count):
            x, y = next(batches)
            loss = loss_of(model(x, labels=y))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found = accelerator.reduce(loss.detach(), "mean").item()
            far_off = max(far_off, abs(found - losses[at]))
            assert scheduler.get_last_lr() == rates[at], (at, scheduler.get_last_lr(), rates[at])
        return {"loss": far_off, **compared(parts, kept[0 if first == 0 else 1])}

    def compared(parts, kept):
        wanted, moments = kept
        return {"parameters": far(accelerator.get_state_dict(parts[0]), wanted),
                "moments": moments_off(parts[1], moments)}

    def prepared(typed, seed):
        switch.switch(read(typed))
        net, optimizer, scheduler = made(KIND, seed, rate)
        return accelerator.prepare(net, optimizer, scheduler, shuffled(seed))

    def where(typed, size):
        return folder / f"{size}-{typed.replace(' ', '')}"

    def saved(typed):
        "Train, save, and go on: a save changes nothing."
        parts = prepared(typed, 0 if rank == 0 else rank + 1)
        batches = endless(parts[3])
        before = train(parts, batches, 0, BEFORE)
        save.begin(str(where(typed, n)), f"{typed} {n}", os.environ["ASYNC"] == "yes")
        if os.environ["ASYNC"] != "yes":
            told = jobs.wait(f"{typed} {n}")
            assert not told.failure, told
        after = train(parts, batches, BEFORE, AFTER)
        told = jobs.wait(f"{typed} {n}")
        assert told.state == DONE, told
        return {key: max(before[key], after[key]) for key in after}

    def loaded(typed, source, size):
        "Other values, another order of the data, the checkpoint, and the steps that come after it."
        parts = prepared(typed, rank + 5)
        kept = [id(one) for one in (*parts, *parts[1].optimizer.param_groups)]
        told = load.load(str(where(source, size)))
        assert kept == [id(one) for one in (*parts, *parts[1].optimizer.param_groups)]
        assert told.step == BEFORE, told
        at_once = compared(parts, alone()[2][0])
        later = train(parts, endless(parts[3]), BEFORE, AFTER)
        return {key: max(at_once.get(key, 0.0), later[key]) for key in later}

    use("ddp")
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    found = []
    for function, *given in json.loads(os.environ["JOBS"]):
        began_s = time.perf_counter()
        found.append(tried({"saved": saved, "loaded": loaded}[function], *given))
        if isinstance(found[-1], str):
            break
        gc.collect()
        assert registry.prepared() == []
        print(function, *given, found[-1], f"{time.perf_counter() - began_s:.2f} s", flush=True)
    done(found=found)
"""
)
