"""Runnable jobs and the command line: the only room that may import both trainers and rollout."""
