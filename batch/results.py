"""Write the output, and the error file, from a journal with all answers."""

import threading
from contextlib import ExitStack

from batch.prepared_job import PreparedJob
from batch.settings_note import remove_note, write_note
from batch.whole_file import WholeFile
from processes.failpoints import failpoint


def write_results(prepared: PreparedJob, cancelled: threading.Event) -> bool:
    """Write both files whole, in the order of the input, and remove the journal; return False if `cancelled` was set.

    If lines failed, the run's settings are written to a note beside the output. The journal is removed last, so that
    the results can be written again after a kill. Raises OSError.
    """
    job = prepared.job
    with ExitStack() as stack:
        output = stack.enter_context(WholeFile(job.output_path))
        errors = None if job.error_path is None else stack.enter_context(WholeFile(job.error_path))
        for position in range(prepared.total):
            if cancelled.is_set():
                return False
            line, failed = prepared.journal.line(position)
            output.write(line + b"\n")
            if failed and errors is not None:
                errors.write(line + b"\n")
        output.flush()
        failpoint("batch.before_rename")
        if errors is not None:
            errors.flush()
            errors.publish()
            failpoint("batch.between_renames")
        output.publish()
        failpoint("batch.after_rename")
    if prepared.journal.num_failed:
        write_note(job.note_path, job.answer_settings)
    else:
        remove_note(job.note_path)
    prepared.journal.remove()
    return True
