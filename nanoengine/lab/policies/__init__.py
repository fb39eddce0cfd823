"""Scheduling policies, each a `Scheduler` that runs in the lab and on a model."""
