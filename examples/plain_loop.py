"""A plain loop with DDP: `torchrun --nproc-per-node 2 examples/plain_loop.py`."""

import torch
import torch.distributed as dist
from tiny import HIDDEN, LAYERS, Documents, collate, report, tiny_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import evenload


def main() -> None:
    dist.init_process_group("gloo")
    dataset = Documents(64)
    sampler: DistributedSampler[object] = DistributedSampler(dataset, seed=1)
    dataloader = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate)
    model = tiny_model()

    # These lines are evenload's; without them, `for batch in dataloader` is the same training.
    loader = evenload.BalancedLoader(
        dataloader,
        items=evenload.packed_images("pixel_values", "image_grid_thw", merge=2),
        cost=evenload.ViTCost(hidden=HIDDEN, layers=LAYERS),
    )
    evenload.hf.balance(model, loader)

    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = ddp(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    report(loader, loss.item())
    loader.close()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # when what holds the group, such as DDP, is gone
