"""The messages between the scheduler and the process that renders chat templates.

A job: the sizes in bytes of template and job, each 4 bytes big-endian, then both; if the template is the last job's,
its size is TEMPLATE_AS_BEFORE and it is not sent. A job is JSON: {"context", "content_format",
"continue_final_message"}. An answer: the number of bytes that follow, then a kind (one letter) and UTF-8 text. A
capital letter means that the process exits after it.
"""

import struct

JOB_HEADER = struct.Struct(">II")
ANSWER_HEADER = struct.Struct(">I")
TEMPLATE_AS_BEFORE = 2**32 - 1
READY, TEXT, ERROR = b"r", b"t", b"e"


def job_frame(template: bytes | None, job: bytes) -> bytes:
    """Return the frame of a job; `None` is the previous job's template."""
    if template is None:
        return JOB_HEADER.pack(TEMPLATE_AS_BEFORE, len(job)) + job
    return JOB_HEADER.pack(len(template), len(job)) + template + job


def answer_frame(kind: bytes, text: bytes) -> bytes:
    """Return the frame of an answer."""
    return ANSWER_HEADER.pack(len(kind) + len(text)) + kind + text
