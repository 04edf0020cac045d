"""`pdserve run-batch`: what was typed, where its files lie, who answers, what it shows, and how it is interrupted."""
