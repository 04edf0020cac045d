"""Refuse a request that cannot be sent to an instance, before it is queued. Pure."""

from scheduler.request import GenerationRequest
from wire.check_prompt import check_ids, check_params, check_seed


def check_request(request: GenerationRequest) -> None:
    """Raise InvalidRequest for parameters out of range, with the value and the limit.

    Instances check them too. But a value that does not fit a message would end the session, and with it all other work
    on that session.
    """
    check_params(request.params)
    for seed in request.seeds:
        check_seed(seed)
    for prompt in request.prompts:
        check_ids("prompt", prompt)
