"""Trainings on a vGPU whose worker is killed: prints lines of a name and a number. A training has the same
weights, to the bit, as the one before any death. Begins when the first file exists that the command line
names, and ends when the second one exists."""

import hashlib
import os
import sys
import time

import torch
from torch import nn

STEPS = 30
WIDTH = 4096


def train():
    """Trains a model. Returns a checksum of its weights, its first and its last loss, and the longest
    step in milliseconds."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).cuda()
    inputs = torch.randn(WIDTH, WIDTH, device="cuda")
    labels = torch.randint(0, 10, (WIDTH,), device="cuda")
    losses, longest = [], 0.0
    for _ in range(STEPS):
        begun = time.monotonic()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        # The import of PyTorch's optimizers takes an emulated CPU minutes.
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
        losses.append(float(loss.detach()))
        longest = max(longest, time.monotonic() - begun)
    weights = hashlib.sha256()
    for parameter in model.parameters():
        # Sums of parts instead of all bytes: an emulated CPU is slow.
        bits = parameter.detach().view(torch.int32).flatten()
        weights.update(bits.sum().cpu().numpy().tobytes())
        weights.update(bits[:: max(1, len(bits) // 4096)].contiguous().cpu().numpy().tobytes())
    return weights.hexdigest(), losses[0], losses[-1], longest * 1000


reference, first, last, alone = train()
print("loss_falls", int(last < first), flush=True)
print("first_loss", first)
print("last_loss", last, flush=True)
print("repeatable", int(train()[0] == reference), flush=True)
print("ready 1", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
trainings, equal, longest = 0, 0, 0.0
while not os.path.exists(sys.argv[2]):
    weights, _, _, step = train()
    trainings += 1
    equal += weights == reference
    longest = max(longest, step)
    print("trained", trainings, flush=True)
print("trainings_exact", int(trainings > 0 and equal == trainings))
print("trainings_count", trainings)
print("longest_step_alone_ms", alone)
print("longest_step_ms", longest, flush=True)
