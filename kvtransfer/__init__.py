"""The KV hand-off: tickets, links, transports. The sender announces, the receiver moves the bytes into its own pool."""
