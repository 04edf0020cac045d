"""Scheduler and instance over gRPC: client, server, channel options, and packing of several messages into one."""
