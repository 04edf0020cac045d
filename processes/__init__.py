"""What processes on one host need beside their work: the channel between ranks, and failpoints for tests."""
