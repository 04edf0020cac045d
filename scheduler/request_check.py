"""Refuse a request that no instance can be told of, before it is queued. Pure."""

from scheduler.request import GenerationRequest
from wire.check_prompt import check_ids, check_params, check_seed


def check_request(request: GenerationRequest) -> None:
    """Raise InvalidRequest for parameters out of range, with the value and the limit.

    Instances check them too. But what no message can carry would end the session that it is sent over, and with it the
    work of everyone else there.
    """
    check_params(request.params)
    for seed in request.seeds:
        check_seed(seed)
    for prompt in request.prompts:
        check_ids("prompt", prompt)
