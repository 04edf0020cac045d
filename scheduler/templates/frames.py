"""What passes between the scheduler and the process that renders chat templates.

To it go jobs: how many bytes the template and the job have, each as 4 bytes big-endian, then both; a template that is
the last job's is not sent again, its number is TEMPLATE_AS_BEFORE. A job is JSON: {"context", "content_format",
"continue_final_message"}. Back come answers: how many bytes follow, then a kind (one letter) and UTF-8 text. A capital
letter says that the process ends now.
"""

import struct

JOB_HEADER = struct.Struct(">II")
ANSWER_HEADER = struct.Struct(">I")
TEMPLATE_AS_BEFORE = 2**32 - 1
READY, TEXT, ERROR = b"r", b"t", b"e"


def job_frame(template: bytes | None, job: bytes) -> bytes:
    """Return a job to send; `None` is the template of the job before."""
    if template is None:
        return JOB_HEADER.pack(TEMPLATE_AS_BEFORE, len(job)) + job
    return JOB_HEADER.pack(len(template), len(job)) + template + job


def answer_frame(kind: bytes, text: bytes) -> bytes:
    """Return an answer to send."""
    return ANSWER_HEADER.pack(len(kind) + len(text)) + kind + text
