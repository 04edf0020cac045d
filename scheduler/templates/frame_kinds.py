"""What the scheduler and the process that renders chat templates send each other, as frames (processes/frames.py).

A job is two frames: CHANGED and the template, or an empty frame if the template is the last job's; then JSON:
{"context", "content_format", "continue_final_message"}. An answer is TEXT or ERROR, then UTF-8 text, in one frame; a
capital letter means that the process exits after it. READY comes first.
"""

CHANGED = b"t"
READY, TEXT, ERROR = b"r", b"t", b"e"
