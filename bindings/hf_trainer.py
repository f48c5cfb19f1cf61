"""The Trainer of transformers on balanced batches: `class BalancedTrainer(BalancedTrainerMixin, Trainer): pass`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evenload.balancer.errors import ItemError
from evenload.bindings.hf import balance
from evenload.bindings.skipping import teach_skipping
from evenload.loaders.loader import BalancedLoader
from evenload.loaders.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evenload.loaders.over import PassesOver

__all__ = ["BalancedTrainerMixin"]


class BalancedTrainerMixin:
    """Balances what a `transformers.Trainer` trains on; put it before the Trainer among a class's bases.

        class BalancedTrainer(evenload.hf.BalancedTrainerMixin, Trainer):
            pass

        trainer = BalancedTrainer(
            model=model,
            args=args,                # remove_unused_columns=False, as for any multimodal collator
            train_dataset=dataset,
            data_collator=collate,
            balancing={"items": packed_images("pixel_values", "image_grid_thw", merge=2), "cost": cost},
        )

    The training loader is wrapped in a `BalancedLoader` and the model balanced, once; each rank's batches, their order
    and the number of optimizer steps stay what they were, also on resume in the middle of an epoch. Evaluation runs on
    plain batches unless `balance_evaluation` says otherwise: leave it so where evaluation generates.

    Args:
        *args: the Trainer's.
        balancing: settings of `BalancedLoader`, at least `items` and `cost`.
        balance_evaluation: balance the loaders of `evaluate` as well.
        **kwargs: the Trainer's.

    Raises:
        ItemError: settings that make no sense, or a model that encodes no images, videos or audio.
    """

    def __init__(
        self, *args: Any, balancing: Mapping[str, Any], balance_evaluation: bool = False, **kwargs: Any
    ) -> None:
        missing = [name for name in ("items", "cost") if name not in balancing]
        if missing:
            msg = f"balancing holds the settings of BalancedLoader, at least items and cost; found none for {missing}"
            raise ItemError(msg)
        self._balancing = dict(balancing)
        self._balances_evaluation = balance_evaluation
        self._balanced_loaders: dict[str, BalancedLoader] = {}
        self._balanced_model: Any = None
        super().__init__(*args, **kwargs)
        teach_skipping()

    def get_train_dataloader(self) -> BalancedLoader | PassesOver:
        """Return the Trainer's own loader of training batches, balanced."""
        return self._balanced("train", super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's own loader of evaluation batches, balanced where `balance_evaluation` says so."""
        loader = super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]
        return self._balanced("evaluation", loader) if self._balances_evaluation else loader

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return the Trainer's estimate, which counts the entries of the main input; a ticket has none to count."""
        plain = {key: value for key, value in inputs.items() if not isinstance(value, Ticket)}
        return super().floating_point_ops(plain)  # type: ignore[misc]

    def _balanced(self, name: str, loader: Any) -> BalancedLoader | PassesOver:
        """Balance `loader` with the channels of the one before it, where there was one."""
        is_first = name not in self._balanced_loaders
        if is_first:
            self._balanced_loaders[name] = BalancedLoader(loader, **self._balancing)
        balanced = self._balanced_loaders[name]
        model = self.model  # type: ignore[attr-defined]
        if self._balanced_model is not model:  # `model_init` makes another one for each run
            balance(model)
            self._balanced_model = model
        balanced.use_phantoms()
        return balanced if is_first else balanced.over(loader)
