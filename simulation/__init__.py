"""A cluster in virtual time: simulated instances behind the real control plane."""
