"""A recorded decode step equals the eager one, for every recorder that exists here."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import discover

CPU = torch.device("cpu")
RECORDERS = sorted({found.name for found in discover() if found.op == "recorder"})
