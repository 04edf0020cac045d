"""Before torch starts: which backends it loads, how its threads wait, and what the garbage collector does meanwhile."""

import gc
import sys
import weakref
from contextlib import nullcontext
from types import ModuleType

import pytest

from engine.torch_start import loading, only_meanwhile, prepare_torch


def test_several_threads_spin_for_a_bounded_time() -> None:
    environ: dict[str, str] = {}

    prepare_torch(2, environ)

    assert int(environ["GOMP_SPINCOUNT"]) > 0


@pytest.mark.parametrize("environ", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_the_users_settings_are_kept(environ: dict[str, str]) -> None:
    chosen = dict(environ)

    prepare_torch(2, environ)

    assert environ == chosen | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_a_single_thread_waits_for_no_other() -> None:
    environ: dict[str, str] = {}

    prepare_torch(1, environ)

    assert environ == {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_the_user_may_let_torch_load_every_installed_backend() -> None:
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}

    prepare_torch(1, environ)

    assert environ == {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


@pytest.mark.parametrize("before", [{}, {"GOMP_SPINCOUNT": "7"}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}])
def test_a_foreign_process_gets_its_environment_back(before: dict[str, str]) -> None:
    environ = dict(before)

    def load() -> None:
        with only_meanwhile(environ):
            prepare_torch(2, environ)
            meanwhile.append(dict(environ))
            raise OSError("no weights")

    meanwhile: list[dict[str, str]] = []
    with pytest.raises(OSError, match="no weights"):
        load()

    assert meanwhile[0].keys() == {"GOMP_SPINCOUNT", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    assert environ == before


def test_of_two_at_once_the_last_restores_the_environment() -> None:
    environ = {"GOMP_SPINCOUNT": "7"}
    first, second = only_meanwhile(environ), only_meanwhile(environ)

    first.__enter__()
    prepare_torch(1, environ)
    environ["GOMP_SPINCOUNT"] = "9"
    second.__enter__()
    first.__exit__(None, None, None)
    meanwhile = dict(environ)
    second.__exit__(None, None, None)

    assert meanwhile == {"GOMP_SPINCOUNT": "9", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "the second is still loading"
    assert environ == {"GOMP_SPINCOUNT": "7"}


def test_settings_between_two_loads_stay() -> None:
    environ: dict[str, str] = {}
    with only_meanwhile(environ):
        prepare_torch(2, environ)
    environ["GOMP_SPINCOUNT"] = "7"

    with only_meanwhile(environ):
        prepare_torch(2, environ)

    assert environ == {"GOMP_SPINCOUNT": "7"}


def test_the_collector_is_as_before_after_loading_even_if_it_fails() -> None:
    before = gc.get_threshold()

    def load() -> None:
        with loading():
            meanwhile.append(gc.get_threshold())
            raise OSError("no weights")

    meanwhile: list[tuple[int, int, int]] = []
    with pytest.raises(OSError, match="no weights"):
        load()

    assert meanwhile != [before]
    assert gc.get_threshold() == before


class Circle:
    """What only a collection lets go, as a model is."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("is_ours", [True, pytest.param(False, marks=pytest.mark.long)])
def test_only_our_own_processes_freeze_loaded_objects(is_ours: bool) -> None:
    with nullcontext() if is_ours else only_meanwhile({}), loading():
        made = Circle()
    gone = weakref.ref(made)

    del made
    gc.collect()

    assert (gone() is None) is not is_ours, "a script that drops a model has its memory back"
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    assert gone() is None


def test_a_scripts_next_load_starts_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", ModuleType("torch")))
    with only_meanwhile({}), loading():
        made = Circle()
    gone = weakref.ref(made)
    del made

    with only_meanwhile({}), loading():
        assert gone() is None
