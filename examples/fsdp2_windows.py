"""FSDP2, gradient accumulation, and windows of 4 batches: `torchrun --nproc-per-node 2 examples/fsdp2_windows.py`."""

import torch
import torch.distributed as dist
from tiny import HIDDEN, LAYERS, Documents, collate, report, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import evenload

ACCUMULATION = 4


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dataset = Documents(64)
    sampler: DistributedSampler[object] = DistributedSampler(dataset, seed=1)
    dataloader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=collate)
    model = tiny_model()
    tower, text = model.model.visual, model.model.language_model
    for block in (*tower.blocks, tower, *text.layers, model):
        fully_shard(block, mesh=mesh)

    # These lines are evenload's. The items of ACCUMULATION batches are planned and encoded together.
    loader = evenload.BalancedLoader(
        dataloader,
        items=evenload.packed_images("pixel_values", "image_grid_thw", merge=2),
        cost=evenload.ViTCost(hidden=HIDDEN, layers=LAYERS),
        window=ACCUMULATION,
    )
    evenload.hf.balance(model, loader)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, start=1):
            is_last = number % ACCUMULATION == 0 or number == len(loader)
            model.set_requires_gradient_sync(is_last)
            loss = model(**batch).loss
            (loss / ACCUMULATION).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    report(loader, loss.item())
    loader.close()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # when what holds the group, such as DDP, is gone
