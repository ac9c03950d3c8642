"""Trainers: batch assembly, advantages, gates, losses, the training loop, replay, weight publishing."""
