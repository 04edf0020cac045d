"""What processes exchange: types, messages, errors, KV layout, codec, the scheduler/instance interface."""
