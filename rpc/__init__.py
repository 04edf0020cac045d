"""Scheduler and instance over gRPC: the client, the server, the channel's options, several messages in one."""
