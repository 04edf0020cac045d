"""Every error keeps its class over the wire, and maps to its HTTP status."""

import pytest

from wire import errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.PromptTooLong("x"), 400),
        (errors.UnknownModel("x"), 404),
        (errors.NotInstalled("x"), 501),
        (errors.Overloaded("x"), 429),
        (errors.InstanceLost("x"), 503),
        (errors.DeadlineExceeded("x"), 504),
        (ValueError("x"), 500),
    ],
)
def test_the_http_status_is_that_of_the_nearest_ancestor(error: Exception, status: int) -> None:
    assert errors.appearance(error).http_status == status


def test_an_error_keeps_its_class_over_the_wire() -> None:
    error = errors.from_name(errors.to_name(errors.NeverFits("3 of 2")), "3 of 2")

    assert type(error) is errors.NeverFits
    assert str(error) == "3 of 2"


def test_a_foreign_error_becomes_an_internal_one() -> None:
    assert errors.to_name(KeyError("secret")) == "InternalError"
    assert type(errors.from_name("os.system", "x")) is errors.InternalError
