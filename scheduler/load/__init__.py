"""What placement uses of each instance: its load, its in-flight prompts and its cached prefixes."""
