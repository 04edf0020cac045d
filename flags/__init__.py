"""The flags that every process of a cluster accepts, how a flag is declared, and their groups in --help."""
