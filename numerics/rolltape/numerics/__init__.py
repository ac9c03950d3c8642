"""Torch code that trainers and rollout must share to the bit: devices, models, log-probs, weights, scoring."""
