"""A loop with Accelerate: `torchrun --nproc-per-node 2 examples/accelerate_loop.py`, or `accelerate launch`."""

import torch
from accelerate import Accelerator
from tiny import HIDDEN, LAYERS, Documents, collate, report, tiny_model
from torch.utils.data import DataLoader

import evenload


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataloader = DataLoader(Documents(64), batch_size=4, shuffle=True, collate_fn=collate)
    ddp, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

    # These lines are evenload's. They stand behind `prepare`, which shards what it is given.
    loader = evenload.BalancedLoader(
        dataloader,
        items=evenload.packed_images("pixel_values", "image_grid_thw", merge=2),
        cost=evenload.ViTCost(hidden=HIDDEN, layers=LAYERS),
    )
    evenload.hf.balance(ddp, loader)

    for _epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(ddp):
                loss = ddp(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    report(loader, loss.item())
    loader.close()


if __name__ == "__main__":
    main()
