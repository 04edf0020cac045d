"""A cluster on virtual time: simulated instances behind the real control plane."""
