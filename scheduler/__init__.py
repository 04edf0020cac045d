"""The cluster's front door and control plane: one process, never torch."""
