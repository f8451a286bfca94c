"""Right steps that are easily taken for wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One step, right under its strategy.

    Attributes:
        code: Python behind `texts.SETUP` that ends in a verification.
        in_test: One of its kind in `make test`; the others are in `make parity`.
    """

    code: str
    in_test: bool = False


STEPS = {
    # Losses outside of the model
    "flipped_at_random": Step(
        """
        start("ddp")
        return verified(call=lambda x: model(x.flip(-1) if torch.rand(()) < 0.5 else x))
        """
    ),
    "one_rank_prints": Step(
        """
        start("ddp")
        return verified(
            backward=lambda loss: (rank or print(loss.exp()), accelerator.backward(loss)))
        """
    ),
    "labels_of_all_ranks": Step(
        """
        start("ddp")
        return verified(ignore=12 * rank, loss=lambda logits, tokens: F.cross_entropy(
            logits.reshape(-1, 24), tokens.reshape(-1), reduction="sum") / 40)
        """
    ),
    "half_of_a_loss": Step(
        """
        start("ddp")
        return verified(loss=lambda logits, tokens: 0.5 * loss_of(logits, tokens))
        """
    ),
    "penalty": Step(
        """
        start("ddp")
        return verified(loss=lambda logits, tokens: loss_of(logits, tokens) + 0.01 * sum(
            p.square().sum() for p in model.parameters()))
        """
    ),
    # Accumulated steps
    "one_micro_batch": Step(
        """
        start("ddp", accumulate=2)
        step(n_steps=1)  # in the middle of a step
        return verified(n_steps=1)
        """,
        in_test=True,
    ),
    "one_micro_batch_twice": Step(
        """
        start("zero1", accumulate=2)
        globals()["planted"] = {"n_steps": 1}
        return verify(StepRequest(code="step(**planted); step(**planted)"))
        """
    ),
    "one_micro_batch_in_two_steps": Step(
        """
        start("ddp", accumulate=2)
        globals()["planted"] = {"n_steps": 1}
        return verify(StepRequest(code="step(**planted)", n_steps=2))
        """
    ),
    "without_an_optimizers_step": Step(
        """
        start("fsdp", accumulate=2)
        globals()["planted"] = {"n_steps": 1}
        verification = verify(StepRequest(code="step(**planted)"))
        assert verification.n_calls == 2, verification.n_calls
        return verification
        """
    ),
    # Methods of the strategy's wrapper
    "no_sync_of_ddp": Step(
        """
        start("ddp")
        def backward(loss):
            with model.no_sync():
                (loss / 2).backward()
            loss_of(model(held[:, :-1]), held[:, 1:]).div(2).backward()
        global held
        held = torch.randint(24, (4, 17))
        return verified(call=lambda x: model.module(x), backward=backward)
        """,
        in_test=True,
    ),
    "sync_of_fsdp": Step(
        """
        start("fsdp")
        def backward(loss):
            model.set_requires_gradient_sync(False)
            (loss / 2).backward()
            model.set_requires_gradient_sync(True)
            loss_of(model(held[:, :-1]), held[:, 1:]).div(2).backward()
        global held
        held = torch.randint(24, (4, 17))
        return verified(backward=backward)
        """
    ),
    # Other models, and rows that are sorted over the batch
    "another_model_is_alive": Step(
        """
        start("zero1")
        kept = model, optimizer
        start("zero1")
        verification = verified()
        del kept
        return verification
        """,
    ),
    "experts": Step(
        """
        start("ddp", kind=WithExperts)
        return verified()
        """,
    ),
    "sorted_samples": Step(
        """
        start("ddp", kind=Sorted)
        return verified()
        """
    ),
}
