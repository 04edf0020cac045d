"""Find models by their hub name, and download their files to a local folder."""
