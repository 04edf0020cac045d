"""What processes say to each other: types, messages, errors, KV layout, codec, the scheduler/instance interface."""
