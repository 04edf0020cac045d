"""The KV hand-off: tickets, links, transports. The sender announces frames, the receiver copies them into its pool."""
