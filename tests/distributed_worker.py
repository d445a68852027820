"""Started by test_distributed.py under torchrun: trains a few steps and saves what rank 0 then holds."""

import json
import sys

import torch
from conftest import gpt

out, changes = sys.argv[1], json.loads(sys.argv[2])
cfg = gpt.make_config({"preset": "smoke", "device": "cpu", **changes})
rt = gpt.start_runtime(cfg)
trainer = gpt.Trainer(cfg, rt)
data = gpt.TrainData(cfg, trainer.schedule)
batches = gpt.Prefetcher(data.batches(cfg, rt, 0, 3), rt.device)
for step in range(3):
    trainer.train_step(batches, trainer.schedule.at(step))
trainer.optimizer.finish()
params = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
spread = 0.0
for p in params.values():
    low, high = p.clone(), p.clone()
    if rt.world_size > 1:
        torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN)
        torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX)
    spread = max(spread, (high - low).abs().max().item())
if rt.is_main:
    shards = [[bank.shard.size(0), bank.params.size(0)] for bank in trainer.optimizer.banks]
    torch.save(dict(params=params, spread=spread, shards=shards), out)
if rt.world_size > 1:
    torch.distributed.destroy_process_group()
