"""Data and protocol between processes: types, messages, errors, KV layout, and the scheduler/instance interface."""
