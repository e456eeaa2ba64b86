"""The smallest script that Lastwords protects: lastwords run -- python examples/minimal/train.py"""

import torch
from torch import nn

from lastwords import Checkpointer

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

checkpointer = Checkpointer(model=model, optimizer=optimizer)
for step in checkpointer.steps(500):
    x = torch.randn(32, 16)
    loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
